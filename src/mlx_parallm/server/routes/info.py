"""vLLM's `/server_info`: what this server is and what its limits are. No paths, no keys."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Query

from mlx_parallm import __version__
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.control import InfoQuery, ModelInfo, ServerInfo, ServerLimits

PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "llguidance", "fastapi", "pydantic", "uvicorn")

router = APIRouter()


@router.get("/server_info")
async def server_info(services: ServicesDep, _: Annotated[InfoQuery, Query()]) -> ServerInfo:
    """Model, versions and limits."""
    settings, stats = services.settings, services.engine.stats()
    return ServerInfo(
        version=__version__,
        versions={"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        system=f"{platform.system()} {platform.machine()}",
        model=ModelInfo(**asdict(services.card)),
        limits=ServerLimits(
            max_batch_size=settings.max_batch_size,
            max_queued=settings.max_queued,
            max_sequences_per_request=settings.max_sequences_per_request,
            max_body_bytes=settings.max_body_bytes,
            kv_cache_bytes=stats.kv_bytes_budget,
            adapter_slots=services.adapters.stats().slots,
        ),
        mode=services.mode,
        paused=stats.paused,
        asleep=services.sleep.asleep,
        draining=services.lifecycle.draining,
        inference=settings.inference,
        training=services.training.status().enabled,
    )
