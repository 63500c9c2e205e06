"""Probes, metrics and state, for operators."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from mlx_parallm import __version__
from mlx_parallm.core import EngineStats
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.server.errors import AsleepError, DrainingError, InferenceDisabledError, NotReadyError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.respond.schedule import schedule_object
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.misc import DebugState, Status, Version

router = APIRouter()


@router.get("/health", responses=raises(EngineDeadError))
async def health(services: ServicesDep) -> Status:
    """503 once the device thread is dead, whatever else still answers."""
    if not services.engine.stats().alive:
        raise EngineDeadError("the device thread is not running")
    return Status(status="ok")


@router.get("/ready", responses=raises(NotReadyError, DrainingError, InferenceDisabledError, AsleepError))
async def ready(services: ServicesDep) -> Status:
    """503 unless new generation requests are taken now: not asleep, and never where the server only trains."""
    services.check_open()
    stats = services.engine.stats()
    if not (stats.alive and stats.ready):
        raise NotReadyError("the engine is not ready")
    return Status(status="ready")


@router.get("/version")
async def version() -> Version:
    """Of this server."""
    return Version(version=__version__)


@router.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
)
async def metrics(services: ServicesDep) -> Response:
    """Prometheus text."""
    return Response(services.metrics.exposition(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


@router.get("/debug/state")
async def debug_state(services: ServicesDep) -> DebugState:
    """Queues, rows, pool, memory."""
    return DebugState(
        engine=_snapshot(services.engine.stats()),
        server={
            "sequences_held": services.gate.held,
            "sequences_limit": services.gate.limit,
            "mode": services.mode,
            "draining": services.lifecycle.draining,
            "asleep": services.sleep.asleep,
            "paused": services.engine.stats().paused,
            "started_at": services.started_at,
        },
        model=asdict(services.card),
    )


def _snapshot(stats: EngineStats) -> dict[str, Any]:
    """Not `asdict`: it copies `detail` by deepcopy, which read-only mappings refuse."""
    state = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return state | {"schedule": schedule_object(stats).model_dump(), "detail": dict(stats.detail)}
