"""Averages: weighted means of adapters, published as adapters."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.app.build import Served
    from mlx_parallm.config import Config
    from mlx_parallm.extras.averages.service import Averages
    from mlx_parallm.rl.service import TrainingService
    from mlx_parallm.server.backend import Backend


def routes(backend: Backend | None) -> tuple[ModuleType, ...]:
    from mlx_parallm.extras.averages import route

    return (route,)


def serve(config: Config, served: Served, training: TrainingService) -> Averages:
    from mlx_parallm.extras.averages.service import Averages

    return Averages(training, served.known.registry, served.known.library.max_rank)
