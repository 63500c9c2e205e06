"""The Tinker API: programs that train adapters with calls of their own, such as `forward_backward`."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.app.build import Served
    from mlx_parallm.config import Config
    from mlx_parallm.extras.tinker.server import TinkerServer
    from mlx_parallm.rl.service import TrainingService
    from mlx_parallm.server.backend import Backend


def routes(backend: Backend | None) -> tuple[ModuleType, ...]:
    from mlx_parallm.extras.tinker import route, sampling, weights

    return route, sampling, weights


def serve(config: Config, served: Served, training: TrainingService) -> TinkerServer:
    from mlx_parallm.extras.tinker.server import TinkerServer
    from mlx_parallm.extras.tinker.service import TinkerService

    settings, known = config.rl_training.tinker, served.known
    policies = TinkerService(
        training.parts.learner,
        served.adapters,
        training.parts.checkpoints,
        known.registry,
        known.library.layout,
        known.library.max_rank,
        settings.max_models,
    )
    return TinkerServer(policies, served.card, settings)
