"""vLLM's `/sleep`, `/wake_up` and `/is_sleeping`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from mlx_parallm.errors import ConflictError, EngineDeadError
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.control import KV_CACHE, Sleeping, SleepQuery, WakeQuery

BANK_LEVEL = 2

router = APIRouter()


@router.post("/sleep", responses=raises(ConflictError, DrainingError, EngineDeadError))
async def sleep(services: ServicesDep, query: Annotated[SleepQuery, Query()]) -> Sleeping:
    """Refuses new completions at once, and answers when those under way have ended and the memory is given back; a
    client that leaves meanwhile stops nothing. Training, adapters and status go on. Woken meanwhile, it answers so.
    409 where a pause holds requests, which would not end."""
    if services.engine.stats().paused and services.gate.held:
        raise ConflictError("A pause holds requests: POST /resume first, or POST /pause?mode=abort to end them.")
    await services.lifecycle.see_through(services.sleep.fall_asleep(query.level == BANK_LEVEL))
    return Sleeping(is_sleeping=services.sleep.asleep)


@router.post("/wake_up")
async def wake_up(services: ServicesDep, query: Annotated[WakeQuery, Query()]) -> Sleeping:
    """Takes completions again, at once; awake already, it changes nothing. What was given back is taken again when a
    request needs it."""
    if not query.tags or KV_CACHE in query.tags:
        services.sleep.wake()
    return Sleeping(is_sleeping=services.sleep.asleep)


@router.get("/is_sleeping")
async def is_sleeping(services: ServicesDep) -> Sleeping:
    """Whether completions are refused because the server is asleep."""
    return Sleeping(is_sleeping=services.sleep.asleep)
