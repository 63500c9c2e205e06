"""Adapters and checkpoints: loading, routing, listing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from mlx_parallm.server.wire.base import WireInput, WireOutput, refused
from mlx_parallm.server.wire.common import INT32_MAX

MAX_NAME, MAX_PATH = 160, 4096
MAX_ROUTES, MAX_WEIGHT = 16, 1e9
MAX_METRICS, MAX_METRIC_NAME = 64, 128

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


def _is_number(value: object, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high  # type: ignore[operator]


def _weights(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or not 1 <= len(value) <= MAX_ROUTES:
        raise refused(f"must map 1 to {MAX_ROUTES} selectors to weights")
    if not all(_is_number(weight, 0, MAX_WEIGHT) for weight in value.values()):
        raise refused(f"each weight must be a number from 0 to {MAX_WEIGHT:g}")
    if not any(value.values()):
        raise refused("at least one weight must be above 0")
    return {selector: float(weight) for selector, weight in value.items()}


def _metrics(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MAX_METRICS or max(map(len, value), default=0) > MAX_METRIC_NAME:
        raise refused(f"must map at most {MAX_METRICS} names of at most {MAX_METRIC_NAME} characters to numbers")
    most = sys.float_info.max
    if not all(_is_number(number, -most, most) for number in value.values()):
        raise refused("each value must be a finite number")
    return {name: float(number) for name, number in value.items()}


_Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
_MetricName = Annotated[str, Field(max_length=MAX_METRIC_NAME)]

Weights = Annotated[
    dict[str, float],
    PlainValidator(
        _weights,
        json_schema_input_type=Annotated[dict[str, _Weight], Field(min_length=1, max_length=MAX_ROUTES)],
    ),
]
Metrics = Annotated[
    dict[str, float],
    PlainValidator(_metrics, json_schema_input_type=Annotated[dict[_MetricName, float], Field(max_length=MAX_METRICS)]),
]


class LoadLoraBody(WireInput):
    """vLLM's. `load_inplace` lets a name that is taken mean the new files from now on."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False,)}

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    load_inplace: bool = False


class UnloadLoraBody(WireInput):
    """vLLM's. `lora_name` may be `name@version`."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str


class RouteBody(WireInput):
    """Selector → weight; `base` is the model itself."""

    weights: Weights


class RollbackBody(WireInput):
    """Without a name, the last change of the route is taken back."""

    lora_name: str | None = None


class SwitchLoraBody(WireInput):
    """`version` is a selector: `math@2`, say."""

    version: str


class SaveCheckpointBody(WireInput):
    """`checkpoint_name` becomes a tag; `lora_name` is a selector, the default adapter if left out."""

    checkpoint_name: Name | None = None
    lora_name: str | None = None
    step: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    metrics: Metrics = Field(default_factory=dict)


class Adapter(WireOutput):
    """One version; `id` is `name@version`. `live`: the bare name means it. `root`: where its files are."""

    id: str
    name: str
    version: int
    live: bool
    residence: Literal["slot", "copy", "file"]
    root: str
    rank: int
    alpha: float
    targets: list[str]
    bytes: int
    created: int
    leases: int
    checkpoint: str | None


class Slots(WireOutput):
    """Of the adapter bank; a pinned one is held by live sequences."""

    total: int
    used: int
    pinned: int


class AdapterList(WireOutput):
    """`route`: where requests that name no adapter go, selector → share."""

    object: Literal["list"]
    data: list[Adapter]
    route: dict[str, float]
    slots: Slots
    bank_bytes: int


class LoadedLora(Adapter):
    status: Literal["success"]
    lora_name: str
    lora_adapter: str


class UnloadedLora(WireOutput):
    """`unloaded`: the versions, as `name@version`."""

    status: Literal["success"]
    unloaded: list[str]


class Route(WireOutput):
    """Where requests that name no adapter go: selector → share, adding up to 1."""

    route: dict[str, float]


class RolledBack(WireOutput):
    """`lora_adapter`: the version that is live again, or the route's heaviest."""

    status: Literal["success"]
    lora_adapter: str
    route: dict[str, float]


class SwitchedLora(WireOutput):
    """`current_lora`: what requests that name no adapter are given now."""

    status: Literal["success"]
    current_lora: str
    route: dict[str, float]


class Checkpoint(WireOutput):
    """`lora_adapter`: the version it holds. A metric that is no finite number is null."""

    name: str
    lora_adapter: str
    step: int
    created: int
    tags: list[str]
    metrics: dict[str, float | None]


class CheckpointList(WireOutput):
    object: Literal["list"]
    data: list[Checkpoint]
