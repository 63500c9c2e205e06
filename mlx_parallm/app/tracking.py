"""Starts the trackers of a run."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.adapters.runs import METRICS, Run
from mlx_parallm.config import Config
from mlx_parallm.rl.tracking.trackers import TrackedRun, tracker_openers
from mlx_parallm.rl.tracking.tracking import Tracking


def start_tracking(config: Config, run: Run, log: Path | None = None) -> Tracking:
    """The trackers that the configuration names, and the JSONL file: `log`, or metrics.jsonl in the run's folder."""
    shown = config.model_dump(mode="json", include={"model", "rl_training"})
    tracked = TrackedRun(run.path, run.id, run.path.name, config.adapters.default_adapter, shown)
    return Tracking(tracker_openers(tracked, config.rl_training.trackers, log))


def metrics_file(run: Run, log: Path | None = None) -> Path:
    """The JSONL file of a run."""
    return log or run.path / METRICS
