"""vLLM's control routes: `/pause`, `/resume`, `/is_paused`, `/sleep`, `/wake_up`, `/is_sleeping`, and
`/reset_prefix_cache`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from pydantic import AfterValidator, Field

from mlx_parallm.core.device import PauseMode
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.errors import ConflictError
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import WireOutput, WireQuery, refused
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

router = Router()


# -- pause -----------------------------------------------------------------------------------------


class PauseQuery(WireQuery):
    """vLLM's parameters of `/pause`."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    """What happens to the requests under way. `abort`: they fail at once with 503 `aborted`, a stream with an error
    event. `wait`: they run to their end. `keep`: they stop, and continue after `/resume`."""
    wait_for_inflight_requests: bool = False
    """vLLM's older name: true is the same as `mode=wait`."""
    clear_cache: bool = True
    """Whether cached prefixes are forgotten, once `mode` has taken effect. It has no effect with `keep`."""


class PausedObject(WireOutput):
    """The pause is in force."""

    status: Literal["paused"]


class ResumedObject(WireOutput):
    """No pause is in force."""

    status: Literal["resumed"]


class PauseStatus(WireOutput):
    """Whether the engine is paused."""

    is_paused: bool
    """True from `/pause` to `/resume`."""


@router.post("/pause", role=Role.ADMIN, audited=True)
async def pause(services: ServicesDep, query: Annotated[PauseQuery, Query()]) -> PausedObject:
    """Stops generation: new requests wait in the bounded queue until `/resume`, and `mode` says what happens to those
    under way. Answers when that has happened, or when a later `/pause` or `/resume` has replaced this one; a client
    that disconnects does not stop it. Training, adapter and status routes continue to work, but an update of training
    that has to be evaluated waits. A shutdown ends a pause."""
    mode = PauseMode.WAIT if query.wait_for_inflight_requests else PauseMode(query.mode)
    clear_cache = query.clear_cache and mode is not PauseMode.KEEP
    await services.lifecycle.run_to_end(_pause(services.engine, mode, clear_cache))
    return PausedObject(status="paused")


async def _pause(engine: EngineClient, mode: PauseMode, clear_cache: bool) -> None:
    await engine.pause(mode)
    if clear_cache:
        await engine.reset_prefix_cache()


@router.post("/resume", role=Role.ADMIN, audited=True)
async def resume(services: ServicesDep) -> ResumedObject:
    """Ends a pause: stopped and waiting requests continue. Without a pause it changes nothing."""
    await services.lifecycle.run_to_end(services.engine.resume())
    return ResumedObject(status="resumed")


@router.get("/is_paused", role=Role.INFERENCE)
async def is_paused(services: ServicesDep) -> PauseStatus:
    """Whether `/pause` is in force. This is true from the call on, even while requests are still under way."""
    return PauseStatus(is_paused=services.engine.stats().paused)


# -- prefix cache ----------------------------------------------------------------------------------


def _only_false(value: bool) -> bool:
    if value:
        raise refused("only false is supported: running requests keep their own keys and values")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_only_false), Field(json_schema_extra={"enum": [False]})]


class ResetPrefixCacheQuery(WireQuery):
    """vLLM's parameters of `/reset_prefix_cache`."""

    reset_running_requests: OnlyFalse = False
    """Only false: running requests keep their own keys and values."""
    reset_external: bool = False
    """Whether the files of `--prefix-cache-dir` are removed too."""


class PrefixCacheReset(WireOutput):
    """Every cached prefix is forgotten."""

    status: Literal["success"]
    tokens: int
    """Number of tokens that were cached in memory."""


@router.post("/reset_prefix_cache", role=Role.ADMIN, audited=True)
async def reset_prefix_cache(
    services: ServicesDep, query: Annotated[ResetPrefixCacheQuery, Query()]
) -> PrefixCacheReset:
    """Forgets every cached prefix. Running requests keep their keys and values; later ones compute their prompts."""
    return PrefixCacheReset(status="success", tokens=await services.engine.reset_prefix_cache(query.reset_external))


# -- sleep -----------------------------------------------------------------------------------------

KV_CACHE = "kv_cache"
ADAPTERS_LEVEL = 2
"""The `level` that frees the adapter bank too."""


class SleepQuery(WireQuery):
    """vLLM's parameter of `/sleep`."""

    level: Annotated[int, Field(ge=1, le=2)] = 1
    """The memory to free. 1: the KV cache, with all cached prefixes. 2: the adapter bank too. Its versions without a
    file are copied to memory, and each is loaded again when a request needs it. The weights stay loaded, because
    training needs them."""


class WakeQuery(WireQuery):
    """vLLM's parameter of `/wake_up`."""

    tags: Annotated[list[Literal["weights", "kv_cache"]], Field(max_length=8)] = Field(default_factory=list)
    """What to wake; by default, everything. `weights` always stay loaded, so without `kv_cache` nothing changes."""


class SleepStatus(WireOutput):
    """Whether the server is asleep."""

    is_sleeping: bool
    """True while completions are refused because of `/sleep`."""


@router.post("/sleep", role=Role.ADMIN, audited=True)
async def sleep(services: ServicesDep, query: Annotated[SleepQuery, Query()]) -> SleepStatus:
    """Refuses new completions at once, and answers when those under way have ended and the memory is free, or when the
    server has been woken in the meantime. If the client disconnects, the server still goes to sleep. Training, adapter
    and status routes continue to work. 409 if a pause holds requests, because they would not end."""
    if services.engine.stats().paused and services.gate.held:
        raise ConflictError("A pause holds requests: POST /resume first, or POST /pause?mode=abort to end them.")
    await services.lifecycle.run_to_end(services.lifecycle.sleep(free_adapters=query.level == ADAPTERS_LEVEL))
    return SleepStatus(is_sleeping=services.lifecycle.asleep)


@router.post("/wake_up", role=Role.ADMIN, audited=True)
async def wake_up(services: ServicesDep, query: Annotated[WakeQuery, Query()]) -> SleepStatus:
    """Accepts completions again at once. If the server is awake, nothing changes. The memory is allocated again when a
    request needs it."""
    if not query.tags or KV_CACHE in query.tags:
        services.lifecycle.wake()
    return SleepStatus(is_sleeping=services.lifecycle.asleep)


@router.get("/is_sleeping", role=Role.INFERENCE)
async def is_sleeping(services: ServicesDep) -> SleepStatus:
    """Whether completions are refused because the server is asleep."""
    return SleepStatus(is_sleeping=services.lifecycle.asleep)
