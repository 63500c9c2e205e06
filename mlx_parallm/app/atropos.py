"""Atropos: how this trainer registers with its trajectory API, and the source of its batches."""

from __future__ import annotations

from mlx_parallm.app.build import Served
from mlx_parallm.config import Config
from mlx_parallm.rl.atropos.scored_data import TokenLimits
from mlx_parallm.rl.atropos.source import AtroposSource
from mlx_parallm.rl.atropos.trajectory_api import Registration, TrajectoryApi
from mlx_parallm.rl.service import TrainingService

PROJECT = "mlx-parallm"
"""The project of the tracker that environments use."""

ENDLESS = 10**9
"""Steps of a server, which trains until it is stopped."""


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


def token_limits(served: Served) -> TokenLimits:
    return TokenLimits(served.card.context_length, served.card.vocab_size)


def open_source(config: Config, served: Served, service: TrainingService, registered: Registration) -> AtroposSource:
    """The source of the batches that the API at `rl_training.atropos_url` makes."""
    url = config.rl_training.atropos_url
    assert url is not None
    return AtroposSource(TrajectoryApi(url), registered, service, token_limits(served))
