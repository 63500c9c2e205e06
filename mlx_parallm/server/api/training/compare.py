"""`/v1/training/compare`: two versions of an adapter on live requests, and what their rewards show."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import Field

from mlx_parallm.core import ComparisonCard, ComparisonSpec
from mlx_parallm.errors import (
    AdapterUnavailableError,
    ConflictError,
    EngineDeadError,
    TrainingDisabledError,
    UnknownModelError,
)
from mlx_parallm.server.api.fields import INT32_MAX, WireInput, WireOutput
from mlx_parallm.server.api.training.objects import utc
from mlx_parallm.server.api.training.schema import ControlBody
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.http.body import json_body
from mlx_parallm.server.openapi.responses import raises
from mlx_parallm.server.planning import MAX_ADAPTER_NAME, adapter_named_by
from mlx_parallm.server.services import KeyDep, ServicesDep, TrainingDep

START_ERRORS = (
    UnknownModelError,
    ConflictError,
    TrainingDisabledError,
    AdapterUnavailableError,
    DrainingError,
    EngineDeadError,
)
Verdict = Literal["running", "promoted", "withdrawn", "no_difference", "stopped", "failed"]

router = APIRouter()


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


class ComparisonObject(WireOutput):
    """A comparison that runs, or the last one of its adapter."""

    lora_adapter: str
    """The adapter."""
    live: str
    """The version that stays live unless the candidate is promoted."""
    candidate: str
    """The version that is compared with it."""
    automatic: bool
    """Whether an update made the candidate; otherwise a request named it."""
    verdict: Verdict
    """`running`; `promoted`: the candidate is live now; `withdrawn`: its rewards were worse, or its numbers were not
    finite; `no_difference`; `stopped`; `failed`: the version that had won could not go live."""
    reason: str
    """Why it ended; empty while it runs."""
    share: float
    """Share of the requests that get the candidate."""
    live_requests: int
    """Requests that the live version got in the comparison, rewarded or not."""
    candidate_requests: int
    """Requests that the candidate got."""
    live_rewards: int
    """Rewarded requests of the live version."""
    candidate_rewards: int
    """Rewarded requests of the candidate."""
    live_mean: float | None
    """Mean reward of the live version; null before the first."""
    candidate_mean: float | None
    """Mean reward of the candidate; null before the first."""
    p_better: float
    """The smallest error rate at which the candidate would have been called better by now, 0 to 1. It is valid at any
    time, however often it is read."""
    p_worse: float
    """The same for worse."""
    clipped: int
    """Rewards outside of the configured range, which count as its ends."""
    started: str
    """Time in ISO-8601, UTC."""
    ended: str | None
    """Time in ISO-8601, UTC; null while it runs."""


class ComparisonList(WireOutput):
    """The comparisons of all adapters."""

    object: Literal["list"]
    data: list[ComparisonObject]
    """Of each adapter, the one that runs, or else the last one since the server started."""


@router.get("/v1/training/compare", responses=raises(TrainingDisabledError))
async def comparisons(training: TrainingDep, key: KeyDep) -> ComparisonList:
    """The comparisons that run, and the last ones."""
    cards = training.competition.cards(key.reader)
    return ComparisonList(object="list", data=[comparison_object(card) for card in cards])


@router.post("/v1/training/compare", responses=raises(*START_ERRORS))
async def compare(
    body: Annotated[CompareBody, Depends(json_body(CompareBody))], services: ServicesDep, training: TrainingDep
) -> ComparisonObject:
    """Compares a version of an adapter with the live one, by the rewards of requests that name the adapter, or that
    name none if it is the default one. Answers when the first request can get the candidate."""
    spec = ComparisonSpec(body.candidate, body.share, body.smallest_effect, body.max_rewards, body.max_hours)
    reader = services.key.reader
    with adapter_named_by("lora_adapter", body.lora_adapter):
        training.status(body.lora_adapter, reader=reader)  # an unknown one is no error of `candidate`
    if "@" in body.candidate:  # otherwise it is a checkpoint of the adapter
        services.find(body.candidate, "candidate")
    with adapter_named_by("candidate", body.candidate):
        starting = training.competition.start(body.lora_adapter, spec, reader)
        return comparison_object(await services.lifecycle.run_to_end(starting))


@router.post(
    "/v1/training/compare/stop",
    responses=raises(UnknownModelError, ConflictError, TrainingDisabledError, DrainingError, EngineDeadError),
)
async def stop_comparing(
    body: Annotated[ControlBody, Depends(json_body(ControlBody, required=False))],
    services: ServicesDep,
    training: TrainingDep,
) -> ComparisonObject:
    """Ends the comparison of an adapter without a winner: the version that was live stays."""
    with adapter_named_by("lora_adapter", body.lora_adapter):
        stopping = training.competition.stop(body.lora_adapter, services.key.reader)
        return comparison_object(await services.lifecycle.run_to_end(stopping))


def comparison_object(card: ComparisonCard) -> ComparisonObject:
    return ComparisonObject.model_validate(
        {
            "lora_adapter": card.adapter,
            "live": str(card.live),
            "candidate": str(card.candidate),
            "automatic": card.automatic,
            "verdict": card.verdict,
            "reason": card.reason,
            "share": card.share,
            "live_requests": card.live_requests,
            "candidate_requests": card.candidate_requests,
            "live_rewards": card.live_rewards,
            "candidate_rewards": card.candidate_rewards,
            "live_mean": card.live_mean,
            "candidate_mean": card.candidate_mean,
            "p_better": card.p_better,
            "p_worse": card.p_worse,
            "clipped": card.clipped,
            "started": utc(card.started),
            "ended": None if card.ended is None else utc(card.ended),
        }
    )
