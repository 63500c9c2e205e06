"""Adapters: vLLM's load and unload routes, `/v1/adapters`, `switch-lora`, and checkpoints on disk.

A change affects only later requests: those under way keep their adapter version. A change runs to its end even if the
client disconnects.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NoReturn

from fastapi import Depends, Path
from pydantic import Field, PlainValidator

from mlx_parallm.adapters.cards import AdapterCard, CheckpointCard, KeptPart
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef, AdapterText
from mlx_parallm.core.json_values import fields_of
from mlx_parallm.errors import InvalidRequestError, UnknownModelError
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import INT32_MAX, Name, Neutral, WireInput, WireOutput, refused
from mlx_parallm.server.api.training import stop_teaching
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import adapter_named_by
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.extras.competition.service import CompetitionService

MAX_PATH = 4096
MAX_ROUTES, MAX_WEIGHT = 16, 1e9
MAX_METRICS, MAX_METRIC_NAME = 64, 128

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


class ReplaceLoraBody(WireInput):
    """An adapter to load in place of the one with its name; prime-rl's body."""

    NEUTRAL: ClassVar[Neutral] = {"is_3d_lora_weight": (False,), "load_inplace": (True,), "pinned": (False,)}

    lora_name: Name
    """The adapter's name; not a path."""
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    """A folder under the operator's adapter roots, or an id on the Hugging Face hub that the operator allows."""
    base_model_name: BaseName | None = None
    """The base model that the adapter is for; by default, the one that its files name, or else the first one."""


class LoadLoraBody(ReplaceLoraBody):
    """An adapter to load; vLLM's body."""

    NEUTRAL: ClassVar[Neutral] = {"is_3d_lora_weight": (False,)}

    load_inplace: bool = False
    """Whether the name may be in use already. If it is, later requests with this name get the new version."""


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


@dataclass(frozen=True, slots=True)
class Traffic:
    """`requests`: that each version got since the server started; those of `BASE_ADAPTER` had no adapter.
    `unnamed_shares`: the share that each version gets now of the requests that name no adapter, 0 to 1."""

    requests: Counter[AdapterRef]
    unnamed_shares: Mapping[AdapterRef, float]

    @classmethod
    def of(cls, services: Services) -> Traffic:
        return cls(services.metrics.adapters.requests(), _unnamed_shares(services))


def _unnamed_shares(services: Services) -> Mapping[AdapterRef, float]:
    """While two versions of an adapter are compared, they share what its name gets."""
    competition: CompetitionService | None = services.extra("competition")
    cards = competition.cards(services.key.reader) if competition else ()
    compared = {card.adapter: card for card in cards if card.verdict == "running"}
    shares: defaultdict[AdapterRef, float] = defaultdict(float)
    for selector, share in services.adapters.route().items():
        if selector == BASE_ADAPTER.name:
            shares[BASE_ADAPTER] += share
        elif (card := compared.get(selector)) is not None:
            shares[card.live] += share * (1 - card.share)
            shares[card.candidate] += share * card.share
        else:
            shares[services.adapters.find(selector).ref] += share
    return shares


STOP_FIRST = "stop that with POST /v1/training/stop first."

router = Router()


# -- load and unload -------------------------------------------------------------------------------


@router.post(
    "/v1/load_lora_adapter",
    role=Role.TRAIN,
    audited=True,
    examples={
        "from a folder": {"lora_name": "tone", "lora_path": "tone"},
        "in place": {"lora_name": "math", "lora_path": "math", "load_inplace": True},
    },
)
async def load_lora_adapter(
    body: Annotated[LoadLoraBody, Depends(json_body(LoadLoraBody))], services: ServicesDep
) -> LoadedLora:
    """Loads an adapter, and answers when the new version is live. The name `name@number` gives the version this number:
    it must be higher than those of all versions that the name has had (409 otherwise), and the version is kept until it
    is unloaded."""
    return await _load(services, body, body.load_inplace)


@router.post(
    "/load_lora_adapter",
    role=Role.TRAIN,
    audited=True,
    examples={"from a folder": {"lora_name": "tone", "lora_path": "tone"}},
)
async def replace_lora_adapter(
    body: Annotated[ReplaceLoraBody, Depends(json_body(ReplaceLoraBody))], services: ServicesDep
) -> LoadedLora:
    """Loads an adapter, and answers when the new version is live. Requests under way with this name keep the version
    that they began with, and later ones get the new one. `/v1/load_lora_adapter` does the same with `load_inplace`."""
    return await _load(services, body, in_place=True)


async def _load(services: Services, body: ReplaceLoraBody, in_place: bool) -> LoadedLora:
    base = services.base_called(body.base_model_name, "base_model_name")
    services.check_may_change(body.lora_name)
    services.check_not_trained(
        body.lora_name,
        "its versions are those of its updates. Load the files under another name. POST /v1/training/rollback serves "
        "an earlier version.",
    )
    card = await services.lifecycle.run_to_end(services.adapters.load(body.lora_name, body.lora_path, in_place, base))
    adapter = adapter_object(card, Traffic.of(services), services)
    return LoadedLora(**fields_of(adapter), status="success", lora_name=card.ref.name, lora_adapter=card.ref)


@router.post(
    "/v1/unload_lora_adapter",
    "/unload_lora_adapter",
    role=Role.TRAIN,
    audited=True,
    examples={"all versions": {"lora_name": "math"}},
)
async def unload_lora_adapter(
    body: Annotated[UnloadLoraBody, Depends(json_body(UnloadLoraBody))], services: ServicesDep
) -> UnloadedLora:
    """Removes an adapter, or one version of it, until it is loaded again; a start of the server loads those of the
    adapter folder and of checkpoints. Requests under way with it run to their end. An adapter in training is a 409."""
    return await unload(services, body.lora_name, "lora_name", body.base_model_name)


async def unload(services: Services, selector: str, param: str, base_model_name: str | None = None) -> UnloadedLora:
    """See `core.AdapterClient.unload`. `param`: the request field that has the selector."""
    base = services.base_called(base_model_name, "base_model_name")
    services.check_may_change(selector)
    if selector in services.models.names:
        raise UnknownModelError("The base model is no adapter; it cannot be unloaded.", param=param)
    if "@" not in selector:
        services.check_not_trained(selector, f"its next update would bring it back; {STOP_FIRST}")
    with adapter_named_by(param, selector):
        removed = await services.lifecycle.run_to_end(services.adapters.unload(selector, base))
    return UnloadedLora(status="success", unloaded=[str(ref) for ref in removed])


# -- route and rollback ----------------------------------------------------------------------------


@router.post(
    "/v1/model/switch-lora",
    "/model/switch-lora",
    role=Role.TRAIN,
    audited=True,
    examples={"one version": {"version": "math@1"}, "the model itself": {"version": "base"}},
)
async def switch_lora(
    body: Annotated[SwitchLoraBody, Depends(json_body(SwitchLoraBody))], services: ServicesDep
) -> SwitchedLora:
    """Sends all requests that name no adapter to one version."""
    with adapter_named_by("version", body.version):
        route = await services.lifecycle.run_to_end(services.adapters.set_route({body.version: 1.0}))
    with services.adapters.lease(None) as current:
        return SwitchedLora(status="success", current_lora=str(current), route=dict(route))


@router.get("/v1/adapters/route", role=Role.INFERENCE)
async def get_route(services: ServicesDep) -> AdapterRoute:
    """The adapters that serve requests which name none, and their shares."""
    return AdapterRoute(route=dict(services.adapters.route()))


@router.post(
    "/v1/adapters/route", role=Role.TRAIN, audited=True, examples={"a tenth": {"weights": {"base": 0.9, "math": 0.1}}}
)
async def set_route(body: Annotated[RouteBody, Depends(json_body(RouteBody))], services: ServicesDep) -> AdapterRoute:
    """Splits the requests that name no adapter between versions, in proportion to the weights."""
    with adapter_named_by("weights", *body.weights):
        route = await services.lifecycle.run_to_end(services.adapters.set_route(body.weights))
    return AdapterRoute(route=dict(route))


@router.delete("/v1/adapters/route", role=Role.TRAIN, audited=True)
async def reset_route(services: ServicesDep) -> AdapterRoute:
    """Sends all requests that name no adapter to the base model."""
    to_base = services.adapters.set_route({BASE_ADAPTER.name: 1.0})
    return AdapterRoute(route=dict(await services.lifecycle.run_to_end(to_base)))


@router.post("/v1/adapters/rollback", role=Role.TRAIN, audited=True, examples={"an adapter": {"lora_name": "math"}})
async def roll_back(
    body: Annotated[RollbackBody, Depends(json_body(RollbackBody))], services: ServicesDep
) -> RolledBack:
    """Makes an adapter's previous version live again, or undoes the last change of the route. With a checkpoint folder,
    a restart serves the same version."""
    services.check_may_change(body.lora_name)
    services.check_not_trained(body.lora_name, "POST /v1/training/rollback serves an earlier version.")
    with adapter_named_by("lora_name", body.lora_name):
        live, route = await services.lifecycle.run_to_end(services.adapters.rollback(body.lora_name))
    return RolledBack(status="success", lora_adapter=str(live), route=dict(route))


# -- the end of an adapter -------------------------------------------------------------------------


@router.post(
    "/v1/adapters/delete",
    role=Role.ADMIN,
    audited=True,
    examples={"what would go": {"lora_name": "math", "dry_run": True}},
)
async def delete_all(
    body: Annotated[DeleteAdapterBody, Depends(json_body(DeleteAdapterBody))], services: ServicesDep
) -> DeletedAdapter:
    """Removes an adapter and all that the server has kept of it: its versions, its subfolder of the adapter folder,
    checkpoints, collected trajectories, its lesson, and the records of its training. With `dry_run`, only says what
    would go."""
    name, training = body.lora_name, services.training
    services.check_may_change(name)
    if not body.dry_run and body.stop_training and training is not None and services.is_trained(name):
        stopping = stop_teaching(services, training, name, reader=services.key.reader)
        await services.lifecycle.run_to_end(stopping)
    if not body.dry_run:
        services.check_not_trained(name, f"send stop_training true, or {STOP_FIRST}")
    with adapter_named_by("lora_name", name):
        parts = await services.lifecycle.run_to_end(services.adapters.delete(name, body.dry_run))
    return DeletedAdapter(
        status="success",
        lora_name=name,
        deleted=not body.dry_run,
        parts=parts,
        in_training=services.is_trained(name),
    )


# -- list; `{selector}` matches every path, so these routes come after those above ------------------

Selector = Annotated[
    str, Path(description="`name` (its live version), `name@version`, or a checkpoint of the default adapter.")
]


@router.get("/v1/adapters", role=Role.INFERENCE)
async def list_adapters(services: ServicesDep) -> AdapterList:
    """All adapter versions that requests may name, and the state of the adapter bank."""
    stats, traffic = services.adapters.stats(), Traffic.of(services)
    return AdapterList(
        object="list",
        data=[adapter_object(card, traffic, services) for card in services.adapters.cards()],
        route=dict(services.adapters.route()),
        route_changed=stats.route_changed,
        base_requests=traffic.requests[BASE_ADAPTER] if services.sees_base else 0,
        slots=SlotCounts(total=stats.slots, used=stats.slots_used, pinned=stats.slots_pinned),
        bank_bytes=stats.bank_bytes,
    )


@router.get("/v1/adapters/{selector:path}", role=Role.INFERENCE)
async def get_adapter(selector: Selector, services: ServicesDep) -> Adapter:
    """One adapter version."""
    return adapter_object(services.find(selector, "selector"), Traffic.of(services), services)


@router.delete("/v1/adapters/{selector:path}", role=Role.TRAIN, audited=True)
async def delete_adapter(selector: Selector, services: ServicesDep) -> UnloadedLora:
    """Removes an adapter, or one version of it, as `/v1/unload_lora_adapter` does."""
    return await unload(services, selector, "selector")


def adapter_object(card: AdapterCard, traffic: Traffic, services: Services) -> Adapter:
    return Adapter(
        **fields_of(replace(card, root=services.path(card.root))),
        name=card.ref.name,
        version=card.ref.version,
        requests=traffic.requests[card.ref],
        unnamed_share=traffic.unnamed_shares.get(card.ref, 0.0),
    )


# -- checkpoints -----------------------------------------------------------------------------------


@router.get("/v1/checkpoints", role=Role.TRAIN)
async def list_checkpoints(services: ServicesDep) -> CheckpointList:
    """The checkpoints on disk, oldest first."""
    cards = [card for card in services.adapters.checkpoints() if services.key.may_change(card.adapter.name)]
    best = {status.adapter: status.best for status in services.training_statuses()}
    tagged = [replace(card, tags=card.tags_beside(best.get(card.adapter.name))) for card in cards]
    return CheckpointList(object="list", data=tagged)


@router.post(
    "/v1/training/checkpoint",
    "/training/checkpoint",
    role=Role.TRAIN,
    audited=True,
    examples={"tagged": {"lora_name": "math", "checkpoint_name": "mine", "metrics": {"accuracy": 0.75}}},
)
async def save_checkpoint(
    body: Annotated[SaveCheckpointBody, Depends(json_body(SaveCheckpointBody, required=False))], services: ServicesDep
) -> CheckpointCard:
    """Saves an adapter version, and answers when its files are complete. For an adapter in training, the optimizer's
    state is saved too; before the adapter's first update, the checkpoint has step 0 and equals the base model."""
    services.check_may_change(body.lora_name)
    tags = [] if body.checkpoint_name is None else [body.checkpoint_name]
    training, reader = services.training, services.key.reader
    with adapter_named_by("lora_name", body.lora_name):
        if training is not None and training.trains(body.lora_name, reader=reader):
            saving = training.save(body.lora_name, body.step, tags, body.metrics, reader=reader)
        else:
            saving = services.adapters.save_checkpoint(body.lora_name, body.step, tags, body.metrics)
        return await services.lifecycle.run_to_end(saving)


# -- weights of whole models -----------------------------------------------------------------------


@router.post("/update_weights", role=Role.TRAIN, include_in_schema=False, response_model=None)
async def refuse_weights() -> NoReturn:
    """Refuses the weights of a whole model. prime-rl takes a 404 for a server that needs no update, and goes on with
    the old weights; other trainers are told by the 404 of the routes that they call first."""
    raise InvalidRequestError(
        "This server takes no weights of a whole model: its base model is shared by all requests and never changes. "
        "Train a LoRA adapter and send each new one with POST /v1/load_lora_adapter (load_inplace true, or the name "
        "name@step) or POST /load_lora_adapter; or let this server train, with POST /v1/training/update."
    )
