"""What `mlx_parallm_train` says at its end: what the whole run has made, where it is, and the next commands."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_parallm.adapters.checkpoints.index import LATEST
from mlx_parallm.adapters.checkpoints.runs import METRICS
from mlx_parallm.cli.curves import draw_curves
from mlx_parallm.cli.train_table import summary
from mlx_parallm.config import KEYS, Config
from mlx_parallm.extras import PLOTS
from mlx_parallm.rl.runs.metrics import Made, read_metrics

_PLOT = "training.png"


def closing(config: Config, folder: Path, args: argparse.Namespace, title: str, stopped: bool) -> Iterator[str]:
    """The last lines of a run that has started. Draws its curves.

    Args:
        folder: of the run.
        stopped: whether a signal has ended it before its last step.
    """
    log = args.log or folder / METRICS
    made = read_metrics(log)
    if stopped:
        yield _stopped(config, made, args.steps)
    if not made:
        return
    yield summary(made)
    yield f"checkpoints in {folder}"
    yield f"updates in {log}"
    if PLOTS.installed:
        yield _drawn(made, args.plot or folder / _PLOT, title)
    yield from _next_commands(config, folder)


def _stopped(config: Config, made: Sequence[Made], steps: int | None) -> str:
    done = max((each.step for each in made if each.is_update), default=0)
    named = config.checkpointing.checkpoint_dir is not None or config.checkpointing.resume
    again = "the same command" if named else "the same command with --resume"
    of_all = "" if steps is None else f" of {steps}"
    return f"stopped after {done}{of_all} steps; {again} continues" if made else "stopped before the first step"


def _drawn(made: Sequence[Made], plot: Path, title: str) -> str:
    try:
        draw_curves(made, plot, title)
    except OSError as error:
        return f"WARNING: {plot} could not be written: {error.strerror}"
    return f"curves in {plot}"


def _next_commands(config: Config, folder: Path) -> Iterator[str]:
    """How to serve what was learnt, and how to make a model of it; nothing without a checkpoint."""
    name, model = config.adapters.default_adapter, config.model
    try:
        checkpoint = folder / name / (folder / name / LATEST).read_text().strip()
    except OSError:
        return
    of_model = [] if model.base_model_path is None else ["--model-path", model.base_model_path]
    rank = config.adapters.max_lora_rank
    of_rank = ["--max-lora-rank", str(rank)] if rank > KEYS["adapters.max_lora_rank"].field.default else []
    serve = ["mlx_parallm", "serve", "--checkpoint-dir", str(folder), "--serve-adapter", name, *of_model, *of_rank]
    merge = ["mlx_parallm", "adapters", "merge", str(checkpoint), f"{name}-merged", *of_model]
    yield f"serve it with `{shlex.join(serve)}`"
    yield f"merge it with `{shlex.join(merge)}`"
