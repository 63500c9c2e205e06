"""vLLM's `/sleep`, `/wake_up` and `/is_sleeping`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.misc import Sleeping

LEVEL = 1

router = APIRouter()
Level = Annotated[
    int, Query(description="1: weights stay; only the KV cache goes.", json_schema_extra={"enum": [LEVEL]})
]


@router.post("/sleep")
async def sleep(services: ServicesDep, level: Level = LEVEL) -> Sleeping:
    """Refuses new completions at once, and answers when those under way have ended and the KV cache is given back; a
    client that leaves meanwhile stops nothing. Training, adapters and status go on. Woken meanwhile, it answers so."""
    if level != LEVEL:
        raise InvalidRequestError(f"level: there is only level {LEVEL}; the weights stay for training.", param="level")
    await services.lifecycle.see_through(services.sleep.fall_asleep())
    return Sleeping(is_sleeping=services.sleep.asleep)


@router.post("/wake_up")
async def wake_up(services: ServicesDep) -> Sleeping:
    """Takes completions again, at once; awake already, it changes nothing."""
    services.sleep.wake()
    return Sleeping(is_sleeping=services.sleep.asleep)


@router.get("/is_sleeping")
async def is_sleeping(services: ServicesDep) -> Sleeping:
    """Whether completions are refused because the server is asleep."""
    return Sleeping(is_sleeping=services.sleep.asleep)
