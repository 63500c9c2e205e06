"""Request and response bodies of the adapter routes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator

from mlx_parallm.adapters.cards import AdapterCard, CheckpointCard, KeptPart
from mlx_parallm.core.adapters import AdapterText
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, WireInput, WireOutput, refused

MAX_NAME, MAX_PATH = 160, 4096
MAX_ROUTES, MAX_WEIGHT = 16, 1e9
MAX_METRICS, MAX_METRIC_NAME = 64, 128

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
BaseName = Annotated[str, Field(min_length=1, max_length=MAX_PATH)]


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
    """An adapter to load; vLLM's body."""

    NEUTRAL: ClassVar[Neutral] = {"is_3d_lora_weight": (False,)}

    lora_name: Name
    """The adapter's name; not a path."""
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    """A folder under the operator's adapter roots."""
    load_inplace: bool = False
    """Whether the name may be in use already. If it is, later requests with this name get the new version."""
    base_model_name: BaseName | None = None
    """The base model that the adapter is for; by default, the one that its files name, or else the first one."""


class UnloadLoraBody(WireInput):
    """An adapter to remove; vLLM's body."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str
    """A name, for all its versions, or `name@version`."""
    base_model_name: BaseName | None = None
    """The base model that the adapter must be one of. Names of adapters are unique on a server, so it may be left
    out."""


class RouteBody(WireInput):
    """How requests that name no adapter are split."""

    weights: Weights
    """Maps each selector to a weight; requests are split in proportion to the weights. A selector is a name,
    `name@version`, `base` for the base model, or a checkpoint of the default adapter."""


class RollbackBody(WireInput):
    """The change to undo."""

    lora_name: str | None = None
    """The adapter whose previous version becomes live. If it is left out, the last change of the route is undone."""


class SwitchLoraBody(WireInput):
    """The adapter version for requests that name none."""

    version: str
    """A selector: a name, `name@version`, or a checkpoint of the default adapter."""


class SaveCheckpointBody(WireInput):
    """The adapter to save."""

    checkpoint_name: Name | None = None
    """A tag for the checkpoint."""
    lora_name: str | None = None
    """A selector of the adapter. If it is left out, the default adapter is saved."""
    step: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Number of the checkpoint. By default, the next number."""
    metrics: Metrics = Field(default_factory=dict)
    """Up to 64 numbers, each with a name, that are saved with the checkpoint."""


class DeleteAdapterBody(WireInput):
    """The adapter to remove with all that is kept of it."""

    lora_name: Name
    """Its name."""
    dry_run: bool = False
    """Whether nothing is removed; the answer says what would be."""
    stop_training: bool = False
    """Whether its lesson and its training are stopped first. By default, an adapter in training is a 409."""


class DeletedAdapter(WireOutput):
    """What was removed of an adapter, or would be."""

    status: Literal["success"]
    lora_name: str
    """Its name."""
    deleted: bool
    """Whether it was removed: false for a `dry_run`."""
    parts: tuple[KeptPart, ...]
    """What was removed, or would be."""
    in_training: bool
    """Whether it is in training now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(AdapterCard):
    """One version of an adapter."""

    name: str
    """The adapter's name."""
    version: int
    """Counted from 1."""
    requests: int
    """Requests that it got since the server started, as in `mlx_parallm_adapter_requests_total`."""
    unnamed_share: float
    """Its share of the requests that name no adapter, 0 to 1. Two versions that are compared share what their name
    gets."""


class SlotCounts(WireOutput):
    """Slots of the adapter bank. Each slot has room for one adapter version."""

    total: int
    """All slots."""
    used: int
    """Slots that have a version."""
    pinned: int
    """Slots in use by sequences under way."""


class AdapterList(WireOutput):
    """All adapter versions that requests may name."""

    object: Literal["list"]
    data: list[Adapter]
    """Ordered by name and version."""
    route: dict[str, float]
    """How requests that name no adapter are split: the share of each selector. The shares add up to 1."""
    route_changed: bool
    """Whether `/v1/adapters/rollback` without a name has a change of the route to undo."""
    base_requests: int
    """Requests that base models got without an adapter, since the server started."""
    slots: SlotCounts
    """Slots of the adapter bank."""
    bank_bytes: int
    """Bytes of the adapter bank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLora(Adapter):
    """The adapter version that was loaded."""

    status: Literal["success"]
    lora_name: str
    """The adapter's name."""
    lora_adapter: AdapterText
    """The version that the name means now, as `name@version`."""


class UnloadedLora(WireOutput):
    """The adapter versions that were removed."""

    status: Literal["success"]
    unloaded: list[str]
    """The versions, as `name@version`."""


class AdapterRoute(WireOutput):
    """How requests that name no adapter are split."""

    route: dict[str, float]
    """The share of each selector. The shares add up to 1."""


class RolledBack(WireOutput):
    """The state after a rollback."""

    status: Literal["success"]
    lora_adapter: str
    """The version that is live again; after a rollback of the route, the one with the largest share."""
    route: dict[str, float]
    """The share of each selector. The shares add up to 1."""


class SwitchedLora(WireOutput):
    """The route after a switch."""

    status: Literal["success"]
    current_lora: str
    """The version that serves requests which name no adapter."""
    route: dict[str, float]
    """The share of each selector. The shares add up to 1."""


class CheckpointList(WireOutput):
    """Checkpoints on disk."""

    object: Literal["list"]
    data: Sequence[CheckpointCard]
    """Oldest first."""
