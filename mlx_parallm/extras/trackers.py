"""TensorBoard, Weights & Biases and Trackio, whose packages are extras.

A package is imported when its tracker is opened, and only if `rl_training.trackers` names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.config import TrackerName
from mlx_parallm.errors import ConfigError
from mlx_parallm.optional_packages import TENSORBOARD, TRACKIO, WANDB, Extra
from mlx_parallm.rl.tracking import Record, Tracker

PROJECT = "mlx-parallm"
"""The project of all runs, in trackers that have projects."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that trackers record.

    `folder`: for the files of trackers. `id`: stays the same when the run is resumed. `adapter`: the default one; the
    names of other adapters are part of the names of their curves. `config`: JSON values without secrets, shown beside
    the curves.
    """

    folder: Path
    id: str
    name: str
    adapter: str
    config: Mapping[str, Any]


def check_installed(wanted: Sequence[TrackerName]) -> None:
    """Raises ConfigError: the package of a tracker is not installed."""
    for name in wanted:
        extra, _ = _PACKAGES[name]
        if not extra.installed:
            raise ConfigError(f"rl_training.trackers: {name.value}: {extra.missing}")


def trackers_of(run: TrackedRun, wanted: Sequence[TrackerName]) -> dict[str, Callable[[], Tracker]]:
    """Functions that open the wanted trackers, by name."""
    return {name.value: partial(_PACKAGES[name][1], run) for name in wanted}


def _scalars(run: TrackedRun, record: Record) -> dict[str, float]:
    """The finite metrics by the names that dashboards group: `train/loss`, `eval/mean`."""
    adapter = record.fields.get("adapter")
    prefix = "" if adapter in (None, run.adapter) else f"{adapter}/"
    return {
        f"{prefix}eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"{prefix}train/{name}": value
        for name, value in record.metrics.items()
        if math.isfinite(value)
    }


class TensorBoardTracker:
    """Writes event files below the run's folder: `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self._tracked = run
        self._writer = SummaryWriter(str(run.folder / "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in _scalars(self._tracked, record).items():
            self._writer.add_scalar(name, value, record.step, record.at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Writes an offline run below the run's folder. `wandb sync` uploads it; nothing is sent before."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._tracked = run
        self._run = wandb.init(
            project=PROJECT, id=run.id, name=run.name, dir=str(run.folder), config=dict(run.config), mode="offline"
        )
        self._run.define_metric("*", step_metric="step")  # a rollback goes back, which wandb's own steps cannot

    def write(self, record: Record) -> None:
        self._run.log({**_scalars(self._tracked, record), "step": record.step})

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """Logs to Trackio's local database, which `trackio show` shows. A run that is resumed is continued."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._tracked = run
        self._run = trackio.init(project=PROJECT, name=run.name, config=dict(run.config), resume="allow")

    def write(self, record: Record) -> None:
        self._run.log(_scalars(self._tracked, record), step=record.step)

    def close(self) -> None:
        self._run.finish()


_PACKAGES: Mapping[TrackerName, tuple[Extra, Callable[[TrackedRun], Tracker]]] = {
    TrackerName.TENSORBOARD: (TENSORBOARD, TensorBoardTracker),
    TrackerName.TRACKIO: (TRACKIO, TrackioTracker),
    TrackerName.WANDB: (WANDB, WandbTracker),
}
