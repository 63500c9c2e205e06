"""vLLM's `/pause`, `/resume`, `/is_paused` and `/reset_prefix_cache`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from mlx_parallm.core import PauseMode
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.control import (
    Paused,
    PauseQuery,
    PauseStatus,
    PrefixCacheReset,
    ResetPrefixCacheQuery,
    Resumed,
)

router = APIRouter()


@router.post("/pause", responses=raises(DrainingError, EngineDeadError))
async def pause(services: ServicesDep, query: Annotated[PauseQuery, Query()]) -> Paused:
    """Nothing more is drawn for requests that come from now on: they wait in the bounded queue for `/resume`. What
    becomes of those under way is the mode's affair. Answers when that has happened, or when a later `/pause` or
    `/resume` has taken its place; a client that leaves meanwhile stops nothing. Training, adapters and status go on; an
    update that is to be evaluated waits. A shutdown ends a pause."""
    mode = PauseMode.WAIT if query.wait_for_inflight_requests else PauseMode(query.mode)
    await services.lifecycle.see_through(services.engine.pause(mode))
    return Paused(status="paused")


@router.post("/resume", responses=raises(DrainingError, EngineDeadError))
async def resume(services: ServicesDep) -> Resumed:
    """Ends a pause: what stood still and what waited goes on. Without a pause it changes nothing."""
    await services.lifecycle.see_through(services.engine.resume())
    return Resumed(status="resumed")


@router.get("/is_paused")
async def is_paused(services: ServicesDep) -> PauseStatus:
    """Whether `/pause` is in force: from the call on, though requests may still be under way."""
    return PauseStatus(is_paused=services.engine.stats().paused)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(_: Annotated[ResetPrefixCacheQuery, Query()]) -> PrefixCacheReset:
    """Nothing to forget: keys and values end with the request that computed them; only the samples of one prompt share
    it. So whatever comes after this call is computed anew."""
    return PrefixCacheReset(status="success")
