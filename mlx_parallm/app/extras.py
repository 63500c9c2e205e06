"""The extras of training: what few use. Nothing but this page imports them, and training works without each of them.

    install_extras ─▶ competition, people, …   which add to the hooks of training
    install_served_extras ─▶ averages, lessons, Tinker, Atropos, …   which requests ask for by name

An extra that is not there is left out. What a setting asks for must be there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mlx_parallm.config import Config

if TYPE_CHECKING:
    from mlx_parallm.app.build import Served
    from mlx_parallm.app.training import TrainingRuntime

_log = logging.getLogger(__name__)

Install = Callable[[Config, "Served", "TrainingRuntime"], Any]
"""Puts an extra in, and returns what requests ask for; None: they ask for nothing."""


def install_extras(config: Config, served: Served, training: TrainingRuntime) -> None:
    """Puts in the extras of every process that trains."""
    _install((_competition, _people, _lesson_groups, _reward_models), config, served, training)


def install_served_extras(config: Config, served: Served, training: TrainingRuntime) -> None:
    """Puts in the extras that only a server has. Training has not started."""
    _install((_averages, _lessons, _tinker, _atropos, _atropos_batches), config, served, training)


def _install(extras: Iterable[Install], config: Config, served: Served, training: TrainingRuntime) -> None:
    for install in extras:
        name = install.__name__.strip("_")
        try:
            extra = install(config, served, training)
        except ModuleNotFoundError as error:
            if not is_extra(error):
                raise
            _log.info("%s is left out: there is no %s", name, error.name)
            continue
        if extra is not None:
            training.extras[name] = extra


def is_extra(error: ModuleNotFoundError) -> bool:
    """Whether what was not found is a module of this package, which only extras lack."""
    return (error.name or "").startswith("mlx_parallm.")


# ---- of every process that trains ----------------------------------------------------------------


def _competition(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.rl.competition.service import install

    return install(training.service)


def _people(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.rl.people import install

    return install(training.service)


def _lesson_groups(config: Config, served: Served, training: TrainingRuntime) -> None:
    from mlx_parallm.rl.lessons.record import install

    install(training.service)


def _reward_models(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.rl.reward_models.trainer import RewardModelTrainer

    return RewardModelTrainer(training.reward_models, training.service.parts.journal, config.model)


# ---- of a server ---------------------------------------------------------------------------------


def _averages(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.rl.averages import Averages

    return Averages(training.service, training.known.registry, training.known.library.max_rank)


def _lessons(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.app.lessons import Lessons

    lessons = Lessons(config, served, training)
    training.on_end.append(lessons.close)
    return lessons


def _tinker(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.rl.policies import PolicyService
    from mlx_parallm.server.protocols.tinker.server import TinkerServer

    settings, parts, known = config.rl_training.tinker, training.service.parts, training.known
    policies = PolicyService(
        training.learner,
        served.adapters,
        parts.checkpoints,
        known.registry,
        known.library.layout,
        known.library.max_rank,
        settings.max_models,
    )
    return TinkerServer(policies, served.card, settings)


def _atropos(config: Config, served: Served, training: TrainingRuntime) -> Any:
    if not config.server.atropos_api:
        return None
    from mlx_parallm.app.atropos import registration
    from mlx_parallm.server.protocols.atropos.route import AtroposParts

    return AtroposParts.of(registration(config, served, step=0), training.service, served.card)


def _atropos_batches(config: Config, served: Served, training: TrainingRuntime) -> None:
    if config.rl_training.atropos_url is None:
        return
    from mlx_parallm.app.atropos import Batches

    batches = Batches(config, served, training.service)
    training.on_start.append(batches.start)
    training.on_end.append(batches.close)
