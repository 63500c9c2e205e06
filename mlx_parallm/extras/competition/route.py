"""`/v1/training/compare`: two versions of an adapter on live requests, and what their rewards show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Depends
from pydantic import Field

from mlx_parallm.extras.competition.comparison import ComparisonCard, ComparisonSpec
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import INT32_MAX, WireInput, WireOutput
from mlx_parallm.server.api.training import ControlBody
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import MAX_ADAPTER_NAME, adapter_named_by
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.extras.competition.service import CompetitionService


router = Router()


async def competition_of(services: ServicesDep) -> CompetitionService:
    competition: CompetitionService = services.require_extra("competition")
    return competition


CompetitionDep = Annotated["CompetitionService", Depends(competition_of)]


class CompareBody(WireInput):
    """A version to compare with the live one."""

    lora_adapter: str | None = None
    """The adapter. By default, the default adapter."""
    candidate: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]
    """The version: `name@version`, or the name or a tag of a checkpoint of the adapter. A checkpoint must have it."""
    share: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Share of the requests that get the candidate. This and the fields below are by default as configured."""
    smallest_effect: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Smallest difference of the mean rewards that matters."""
    max_rewards: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Rewarded requests of the candidate after which the comparison ends without a winner."""
    max_hours: Annotated[float, Field(gt=0, le=24 * 365)] | None = None
    """Hours after which it ends without a winner."""


class ComparisonList(WireOutput):
    """The comparisons of all adapters."""

    object: Literal["list"]
    data: Sequence[ComparisonCard]
    """Of each adapter, the one that runs, or else the last one since the server started."""


@router.get("/v1/training/compare", role=Role.TRAIN)
async def comparisons(services: ServicesDep, competition: CompetitionDep) -> ComparisonList:
    """The comparisons that run, and the last ones."""
    cards = competition.cards(services.key.reader)
    return ComparisonList(object="list", data=cards)


@router.post(
    "/v1/training/compare",
    role=Role.TRAIN,
    audited=True,
    examples={"a checkpoint": {"candidate": "checkpoint-300", "share": 0.2}},
)
async def compare(
    body: Annotated[CompareBody, Depends(json_body(CompareBody))], services: ServicesDep, competition: CompetitionDep
) -> ComparisonCard:
    """Compares a version of an adapter with the live one, by the rewards of requests that name the adapter, or that
    name none if it is the default one. Answers when the first request can get the candidate."""
    spec = ComparisonSpec(body.candidate, body.share, body.smallest_effect, body.max_rewards, body.max_hours)
    reader, training = services.key.reader, services.require_training()
    with adapter_named_by("lora_adapter", body.lora_adapter):
        training.status(body.lora_adapter, reader=reader)  # an unknown one is no error of `candidate`
    if "@" in body.candidate:  # otherwise it is a checkpoint of the adapter
        services.find(body.candidate, "candidate")
    with adapter_named_by("candidate", body.candidate):
        starting = competition.start(body.lora_adapter, spec, reader)
        return await services.lifecycle.run_to_end(starting)


@router.post("/v1/training/compare/stop", role=Role.TRAIN, audited=True, examples={"default adapter": {}})
async def stop_comparing(
    body: Annotated[ControlBody, Depends(json_body(ControlBody, required=False))],
    services: ServicesDep,
    competition: CompetitionDep,
) -> ComparisonCard:
    """Ends the comparison of an adapter without a winner: the version that was live stays."""
    with adapter_named_by("lora_adapter", body.lora_adapter):
        stopping = competition.stop(body.lora_adapter, services.key.reader)
        return await services.lifecycle.run_to_end(stopping)
