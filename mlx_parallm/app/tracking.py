"""Starts the trackers of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlx_parallm.adapters.runs import METRICS, Run
from mlx_parallm.config import Config
from mlx_parallm.extras_table import needed
from mlx_parallm.rl.tracking import JsonlTracker, Tracker, Tracking


def start_tracking(config: Config, run: Run, log: Path | None = None) -> Tracking:
    """The trackers that the configuration names, and the JSONL file: `log`, or metrics.jsonl in the run's folder."""
    opened: dict[str, Callable[[], Tracker]] = {"jsonl": partial(JsonlTracker, metrics_file(run, log))}
    if wanted := config.rl_training.trackers:
        extra = needed("trackers", "rl_training.trackers")
        shown = config.model_dump(mode="json", include={"model", "rl_training"})
        tracked = extra.TrackedRun(run.path, run.id, run.path.name, config.adapters.default_adapter, shown)
        opened |= extra.trackers_of(tracked, wanted)
    return Tracking(opened)


def metrics_file(run: Run, log: Path | None = None) -> Path:
    """The JSONL file of a run."""
    return log or run.path / METRICS
