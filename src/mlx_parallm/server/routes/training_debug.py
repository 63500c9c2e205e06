"""Training from inside, for people with curl; answered with training off too."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from mlx_parallm.server.respond.training import debug_object, trajectory_object
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.training_metrics import statuses
from mlx_parallm.server.wire.training import DebugTraining, DebugTrajectories

MAX_LISTED = 1000

router = APIRouter()


@router.get("/debug/training")
async def debug_training(services: ServicesDep) -> DebugTraining:
    """Every trained adapter's status, with details."""
    trained = [status for status in statuses(services.training) if status.enabled]
    return DebugTraining(training_enabled=bool(trained), adapters=[debug_object(status) for status in trained])


@router.get("/debug/trajectories")
async def debug_trajectories(
    services: ServicesDep, limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="How many at most.")] = 20
) -> DebugTrajectories:
    """The newest trajectories, newest first, with their prompts and answers."""
    cards = services.training.trajectories(limit) if services.training.status().enabled else ()
    return DebugTrajectories(object="list", data=[trajectory_object(card) for card in cards])
