"""Ollama's API, unless `server.ollama_api` turns it off."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.server.backend import Backend


def routes(backend: Backend | None) -> tuple[ModuleType, ...]:
    from mlx_parallm.extras.ollama import embed, models, route

    return (route, embed, models) if backend is None or backend.config.ollama_api else ()
