"""Atropos: groups of its environments, taken from its trajectory API, or from environments that use this server's."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.app.build import Served
    from mlx_parallm.config import Config
    from mlx_parallm.extras.atropos.route import AtroposParts
    from mlx_parallm.rl.service import TrainingService
    from mlx_parallm.server.backend import Backend


def routes(backend: Backend | None) -> tuple[ModuleType, ...]:
    from mlx_parallm.extras.atropos import route

    return (route,) if backend is None or backend.extra("atropos") is not None else ()


def serve(config: Config, served: Served, training: TrainingService) -> AtroposParts | None:
    """Takes the batches of the API at `rl_training.atropos_url`, and has an API of its own if `server.atropos_api` says
    so."""
    from mlx_parallm.extras.atropos.groups import AtroposGroups
    from mlx_parallm.extras.atropos.registration import Batches, registration
    from mlx_parallm.extras.atropos.route import AtroposParts

    if config.rl_training.atropos_url is not None:
        batches = Batches(config, served, training)
        training.hooks.started.append(batches.start)
        training.hooks.ending.append(batches.close)
    if not config.server.atropos_api:
        return None
    groups = AtroposGroups(training)
    return AtroposParts.of(registration(config, served, step=0), training, groups, served.card)
