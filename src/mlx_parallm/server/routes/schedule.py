"""`/v1/training/schedule`: what requests and training get of the device, and what they got."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from mlx_parallm.errors import EngineDeadError, TrainingDisabledError
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.respond.schedule import schedule_object
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.schedule import Schedule, ScheduleBody

router = APIRouter()


@router.get("/v1/training/schedule", responses=raises(TrainingDisabledError))
async def get_schedule(services: ServicesDep) -> Schedule:
    """How device time is shared now."""
    services.check_trains()
    return schedule_object(services.engine.stats())


@router.post(
    "/v1/training/schedule",
    responses=raises(TrainingDisabledError, DrainingError, EngineDeadError),
    openapi_extra=request_body(ScheduleBody),
)
async def set_schedule(
    body: Annotated[ScheduleBody, Depends(json_body(ScheduleBody))], services: ServicesDep
) -> Schedule:
    """Shares device time like this from the next unit of work on; what is left out stays. Lost with a restart."""
    services.check_trains()
    await services.lifecycle.see_through(services.rescheduler.change(body))
    return schedule_object(services.engine.stats())
