"""Starts the trackers of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mlx_parallm.adapters.runs import METRICS, Run
from mlx_parallm.app.extras import trackers_of
from mlx_parallm.config import Config
from mlx_parallm.rl.tracking.tracking import JsonlTracker, Tracking


def start_tracking(config: Config, run: Run, log: Path | None = None) -> Tracking:
    """The trackers that the configuration names, and the JSONL file: `log`, or metrics.jsonl in the run's folder."""
    return Tracking({"jsonl": partial(JsonlTracker, metrics_file(run, log)), **trackers_of(config, run)})


def metrics_file(run: Run, log: Path | None = None) -> Path:
    """The JSONL file of a run."""
    return log or run.path / METRICS
