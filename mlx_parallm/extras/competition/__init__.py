"""Competition: two versions of an adapter in training, compared on what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from mlx_parallm.app.build import Served
    from mlx_parallm.config import Config
    from mlx_parallm.extras.competition.service import CompetitionService
    from mlx_parallm.rl.service import TrainingService
    from mlx_parallm.server.backend import Backend


def routes(backend: Backend | None) -> tuple[ModuleType, ...]:
    from mlx_parallm.extras.competition import route

    return (route,)


def metrics(backend: Backend) -> Iterator[Metric]:
    from mlx_parallm.extras.competition.metric_table import metrics as read

    return read(backend)


def install(config: Config, served: Served, training: TrainingService) -> CompetitionService:
    from mlx_parallm.extras.competition.service import install as install_service

    return install_service(training)
