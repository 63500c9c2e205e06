"""`/v1/training`: updates, rewards, control, status and events.

What changes something is seen through to its end, though the client leaves meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from mlx_parallm.core import GivenTrajectory, ModelCard, TrainingStatus
from mlx_parallm.errors import (
    ConflictError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    StorageError,
    TrainingDisabledError,
    UnknownModelError,
    UnknownTrajectoryError,
)
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.openapi import EVENTS, raises
from mlx_parallm.server.planning import check_ids
from mlx_parallm.server.respond.training import report_object, status_object
from mlx_parallm.server.selectors import naming
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.training_events import TrainingEventsResponse
from mlx_parallm.server.wire.training import (
    ControlBody,
    FeedbackBody,
    GivenTrajectoryBody,
    Scored,
    Training,
    TrainingRollbackBody,
    Update,
    UpdateBody,
)

router = APIRouter()
Control = Annotated[ControlBody, Depends(json_body(ControlBody, required=False))]
CONTROL = request_body(ControlBody, required=False)
CONTROLS = (UnknownModelError, ConflictError, TrainingDisabledError, DrainingError, EngineDeadError)
PUBLISHES = (*CONTROLS, EngineError, StorageError)
LISTENING: dict[int | str, dict[str, Any]] = {
    200: {"content": EVENTS, "description": "Server-sent events."},
    **raises(TrainingDisabledError),
}


@router.post(
    "/v1/training/update",
    responses=raises(*PUBLISHES, ContextLengthError),
    openapi_extra=request_body(UpdateBody, required=False),
)
async def update(
    body: Annotated[UpdateBody, Depends(json_body(UpdateBody, required=False))], services: ServicesDep
) -> Update:
    """One update now, of the groups that wait or of the trajectories given; answers when it is live."""
    given = None if body.trajectories is None else _given(body.trajectories, services.card)
    with naming("lora_adapter", body.lora_adapter or ""):
        updating = services.training.update(body.lora_adapter, given, body.update_inference, body.checkpoint_name)
        return report_object(await services.lifecycle.see_through(updating))


@router.get("/v1/training/status", responses=raises(UnknownModelError))
async def status(
    services: ServicesDep,
    lora_adapter: Annotated[str | None, Query(description="A trained adapter; left out, the default one.")] = None,
) -> Training:
    """Of the default adapter, or of the one named."""
    with naming("lora_adapter", lora_adapter or ""):
        return status_object(services.training.status(lora_adapter))


@router.post("/v1/training/start", responses=raises(*CONTROLS), openapi_extra=CONTROL)
async def start(body: Control, services: ServicesDep) -> Training:
    """Trains this adapter too: from its live version, or, where there is none, from the base."""
    return await _control(body, services, services.training.start)


@router.post("/v1/training/pause", responses=raises(*CONTROLS), openapi_extra=CONTROL)
async def pause(body: Control, services: ServicesDep) -> Training:
    """No update begins by itself any more; trajectories are still collected."""
    return await _control(body, services, services.training.pause)


@router.post("/v1/training/resume", responses=raises(*CONTROLS), openapi_extra=CONTROL)
async def resume(body: Control, services: ServicesDep) -> Training:
    """Updates begin by themselves again."""
    return await _control(body, services, services.training.resume)


@router.post(
    "/v1/training/rollback",
    responses=raises(*PUBLISHES),
    openapi_extra=request_body(TrainingRollbackBody, required=False),
)
async def roll_back(
    body: Annotated[TrainingRollbackBody, Depends(json_body(TrainingRollbackBody, required=False))],
    services: ServicesDep,
) -> Training:
    """Serves and trains on from the best version, or from a checkpoint."""
    with naming("lora_adapter", body.lora_adapter or ""):
        services.training.status(body.lora_adapter)  # whichever name is unknown, the fault names its field
    with naming("to", body.to or ""):
        rolling = services.training.rollback(body.lora_adapter, body.to)
        return status_object(await services.lifecycle.see_through(rolling))


@router.post(
    "/v1/training/feedback",
    responses=raises(UnknownTrajectoryError, ConflictError, TrainingDisabledError),
    openapi_extra=request_body(FeedbackBody),
)
async def feedback(body: Annotated[FeedbackBody, Depends(json_body(FeedbackBody))], services: ServicesDep) -> Scored:
    """A reward for a trajectory, by whoever knows better. Feedback on one of several samples is enough, and the last
    one before training counts; after that, and for a trajectory that was dropped, the answer is 409.
    """
    services.training.feedback(body.trajectory_id, body.score)
    return Scored(status="success", trajectory_id=body.trajectory_id, score=body.score)


@router.get("/v1/training/events", response_class=Response, responses=LISTENING)
async def events(services: ServicesDep) -> Response:
    """What happens from now on. A client that reads too slowly gets an event `events_lost` for those it missed."""
    return TrainingEventsResponse(services)


async def _control(
    body: ControlBody, services: Services, change: Callable[[str | None], Coroutine[Any, Any, TrainingStatus]]
) -> Training:
    with naming("lora_adapter", body.lora_adapter or ""):
        return status_object(await services.lifecycle.see_through(change(body.lora_adapter)))


def _given(bodies: list[GivenTrajectoryBody], card: ModelCard) -> list[GivenTrajectory]:
    """Raises InvalidRequestError, ContextLengthError: the model could not have read or written one of them."""
    return [_trajectory(body, card, f"trajectories[{number}]") for number, body in enumerate(bodies)]


def _trajectory(body: GivenTrajectoryBody, card: ModelCard, param: str) -> GivenTrajectory:
    check_ids(body.prompt_token_ids, card.vocab_size, f"{param}.prompt_token_ids")
    check_ids(body.completion_token_ids, card.vocab_size, f"{param}.completion_token_ids")
    tokens = len(body.prompt_token_ids) + len(body.completion_token_ids)
    if tokens > card.context_length:
        raise ContextLengthError(
            f"This model's context is {card.context_length} tokens, and {param} has {tokens}. Leave it out.",
            param=param,
        )
    return GivenTrajectory(
        prompt_ids=tuple(body.prompt_token_ids),
        completion_ids=tuple(body.completion_token_ids),
        reward=body.reward,
        group_id=body.group_id,
        sampling_logprobs=tuple(body.sampling_logprobs or ()),
        temperature=body.temperature,
    )
