"""People: corrections of answers, and feedback on answers that do not wait any more."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.app.build import Served
    from mlx_parallm.config import Config
    from mlx_parallm.extras.people.service import People
    from mlx_parallm.rl.service import TrainingService
    from mlx_parallm.server.backend import Backend


def routes(backend: Backend | None) -> tuple[ModuleType, ...]:
    from mlx_parallm.extras.people import route

    return (route,)


def install(config: Config, served: Served, training: TrainingService) -> People:
    from mlx_parallm.extras.people.service import install as install_service

    return install_service(training)
