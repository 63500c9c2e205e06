"""Atropos: how this trainer registers with its trajectory API, and the source of its batches."""

from __future__ import annotations

import asyncio
import logging

from mlx_parallm.app.build import Served
from mlx_parallm.app.training_run import ENDLESS
from mlx_parallm.config import Config
from mlx_parallm.extras.atropos.groups import AtroposGroups
from mlx_parallm.extras.atropos.route import AtroposParts
from mlx_parallm.extras.atropos.scored_data import TokenLimits
from mlx_parallm.extras.atropos.source import AtroposSource
from mlx_parallm.extras.atropos.trajectory_api import Registration, TrajectoryApi
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.tasks import spawn

_log = logging.getLogger(__name__)

PROJECT = "mlx-parallm"
"""The project of the tracker that environments use."""


def registration(config: Config, served: Served, step: int, steps: int = ENDLESS) -> Registration:
    """How this trainer describes itself to environments. `step`: steps that were made before."""
    assert served.run is not None  # a server that trains has a run
    return Registration(
        batch_size=config.rl_training.update_frequency,
        max_token_len=served.card.context_length,
        checkpoint_dir=str(served.run.path.absolute()),
        save_checkpoint_interval=config.checkpointing.interval,
        starting_step=step,
        num_steps=steps,
        wandb_group=served.run.id,
        wandb_project=PROJECT,
    )


def open_source(config: Config, served: Served, service: TrainingService, registered: Registration) -> AtroposSource:
    """The source of the batches that the API at `rl_training.atropos_url` makes."""
    url = config.rl_training.atropos_url
    assert url is not None
    limits = TokenLimits(served.card.context_length, served.card.vocab_size)
    return AtroposSource(
        TrajectoryApi(url), registered, limits, AtroposGroups(service).give, lambda: service.loop().has_enough
    )


class Batches:
    """Takes the batches that Atropos makes while a server trains."""

    def __init__(self, config: Config, served: Served, service: TrainingService) -> None:
        self._config, self._served, self._service = config, served, service
        self._source: AtroposSource | None = None
        self._taking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        registered = registration(self._config, self._served, self._service.status().step)
        self._source = open_source(self._config, self._served, self._service, registered)
        self._taking = spawn(self._source.run(), _log, "taking batches from Atropos")

    async def close(self) -> None:
        if self._source is not None and self._taking is not None:
            self._taking.cancel()
            await self._source.close()


def serve(config: Config, served: Served, training: TrainingService) -> AtroposParts | None:
    """Takes the batches of the API at `rl_training.atropos_url`, and has an API of its own if `server.atropos_api` says
    so."""
    if config.rl_training.atropos_url is not None:
        batches = Batches(config, served, training)
        training.hooks.started.append(batches.start)
        training.hooks.ending.append(batches.close)
    if not config.server.atropos_api:
        return None
    groups = AtroposGroups(training)
    return AtroposParts.of(registration(config, served, step=0), training, groups, served.card)
