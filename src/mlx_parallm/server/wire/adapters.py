"""Adapters and checkpoints: loading, routing, listing."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator

from mlx_parallm.server.wire.base import WireInput, WireOutput, refused
from mlx_parallm.server.wire.common import INT32_MAX
from mlx_parallm.server.wire.neutral import Neutral

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
    """vLLM's."""

    NEUTRAL: ClassVar[Neutral] = {"is_3d_lora_weight": (False,)}

    lora_name: Name
    """A plain name, no path."""
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    """A folder under the operator's adapter roots."""
    load_inplace: bool = False
    """Lets a name that is taken mean the new files from now on."""


class UnloadLoraBody(WireInput):
    """vLLM's."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str
    """A name, with all its versions, or `name@version`."""


class RouteBody(WireInput):
    """Requests that name no adapter are split in proportion to the weights."""

    weights: Weights
    """Selector to weight; `base` is the model itself."""


class RollbackBody(WireInput):
    """Back to what was before."""

    lora_name: str | None = None
    """The adapter; left out, the last change of the route is taken back."""


class SwitchLoraBody(WireInput):
    """Where requests that name no adapter go."""

    version: str
    """A selector: a name, `name@version`, or a checkpoint of the default adapter."""


class SaveCheckpointBody(WireInput):
    """What is saved, and how it is found again."""

    checkpoint_name: Name | None = None
    """Becomes a tag."""
    lora_name: str | None = None
    """A selector; left out, the default adapter."""
    step: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Number of the checkpoint; left out, the next one."""
    metrics: Metrics = Field(default_factory=dict)
    """Kept beside it: at most 64 numbers by name."""


class Adapter(WireOutput):
    """One version of an adapter."""

    id: str
    """`name@version`."""
    name: str
    """Of the adapter."""
    version: int
    """Counted from 1."""
    live: bool
    """Whether the bare name means it."""
    residence: Literal["slot", "copy", "file"]
    """In the bank, as a copy in memory, or on disk only."""
    root: str
    """Where its files are."""
    rank: int
    """The largest of its modules'."""
    alpha: float
    """Scale times rank."""
    targets: list[str]
    """Last names of the modules it changes."""
    bytes: int
    """Of its weights, as stored."""
    created: int
    """Unix time, seconds."""
    leases: int
    """Requests that hold it."""
    checkpoint: str | None
    """Its checkpoint's name."""


class Slots(WireOutput):
    """Of the adapter bank."""

    total: int
    """Places for versions."""
    used: int
    """Those that hold one."""
    pinned: int
    """Those held by live sequences."""


class AdapterList(WireOutput):
    """Every version that can be asked for."""

    object: Literal["list"]
    """Always the same."""
    data: list[Adapter]
    """By name and version."""
    route: dict[str, float]
    """Where requests that name no adapter go: selector to share."""
    slots: Slots
    """Places for versions in the batch."""
    bank_bytes: int
    """Bytes of the bank."""


class LoadedLora(Adapter):
    """The version that the name means now."""

    status: Literal["success"]
    """Always the same."""
    lora_name: str
    """The name."""
    lora_adapter: str
    """`name@version` that it means now."""


class UnloadedLora(WireOutput):
    """What is forgotten."""

    status: Literal["success"]
    """Always the same."""
    unloaded: list[str]
    """The versions, as `name@version`."""


class Route(WireOutput):
    """Where requests that name no adapter go."""

    route: dict[str, float]
    """Selector to share, adding up to 1."""


class RolledBack(WireOutput):
    """What is meant now."""

    status: Literal["success"]
    """Always the same."""
    lora_adapter: str
    """The version that is live again, or the route's heaviest."""
    route: dict[str, float]
    """Selector to share, adding up to 1."""


class SwitchedLora(WireOutput):
    """Where requests that name no adapter go now."""

    status: Literal["success"]
    """Always the same."""
    current_lora: str
    """What requests that name no adapter are given now."""
    route: dict[str, float]
    """Selector to share, adding up to 1."""


class Checkpoint(WireOutput):
    """A version on disk."""

    name: str
    """`checkpoint-<step>`."""
    lora_adapter: str
    """The version it holds."""
    step: int
    """Its number."""
    created: int
    """Unix time, seconds."""
    tags: list[str]
    """Other names for it."""
    metrics: dict[str, float | None]
    """As they were given; null for no finite number."""


class CheckpointList(WireOutput):
    """Adapter versions on disk."""

    object: Literal["list"]
    """Always the same."""
    data: list[Checkpoint]
    """Oldest first."""
