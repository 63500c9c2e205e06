"""What `mlx_parallm_train` says at its end: what the whole run has made, where it is, its curves as a PNG, and the next
commands."""

from __future__ import annotations

import argparse
import io
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.adapters.runs import LATEST, METRICS
from mlx_parallm.cli.train_table import summary
from mlx_parallm.config import KEYS, Config
from mlx_parallm.optional_packages import PLOTS
from mlx_parallm.rl.runs.metrics import Made, read_metrics
from mlx_parallm.rl.status import UpdateReport

_PANELS = {
    "loss": "loss",
    "kl": "KL from the base (nats a token)",
    "entropy": "entropy (nats a token)",
    "completion_tokens": "length of answers (tokens, mean)",
    "clip_fraction": "clipped tokens (fraction)",
    "tokens_per_second": "tokens sampled a second",
}
_MAX_MARKERS = 60
"""Curves with more points are drawn as a line without markers."""


def draw_curves(made: Sequence[Made], path: Path, title: str) -> None:
    """Writes the PNG, whole or not at all. A metric that an update lacks is a gap in its curve.

    Raises:
        OSError: the file cannot be written.
    """
    from mlx_parallm.atomic import replace_file

    buffer = io.BytesIO()
    figure(made, title).savefig(buffer, format="png", dpi=120)
    replace_file(path, buffer.getvalue())


def figure(made: Sequence[Made], title: str) -> Any:
    """The matplotlib figure: a panel for the reward, one for evaluations if there are any, and one for each metric."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    updates = [each for each in made if each.is_update]
    steps, reports = [each.step for each in updates], [each.report for each in updates]
    evaluations = [(each.step, *each.evaluation) for each in made if each.evaluation is not None]
    figure = Figure(figsize=(16, 6.5), layout="constrained")
    FigureCanvasAgg(figure)  # opens no window, and shares no state with other figures
    figure.suptitle(title)
    axes = iter(figure.subplots(2, 4).flat)
    _draw_reward(next(axes), steps, reports)
    if evaluations:
        _draw_evaluations(next(axes), evaluations)
    for metric, label in _PANELS.items():
        _draw(next(axes), steps, _series(reports, metric), label)
    for unused in axes:
        unused.remove()
    return figure


def _draw(axes: Any, steps: Sequence[int], values: Sequence[float], label: str) -> None:
    axes.plot(steps, values, marker="." if len(steps) <= _MAX_MARKERS else "", linewidth=1.2)
    _label(axes, label)


def _label(axes: Any, label: str) -> None:
    axes.set_title(label, fontsize="medium")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _draw_reward(axes: Any, steps: Sequence[int], reports: Sequence[UpdateReport]) -> None:
    """The mean reward, with a band of one standard deviation on each side."""
    means, deviations = _series(reports, "reward_mean"), _series(reports, "reward_std")
    _draw(axes, steps, means, "reward (mean ± standard deviation)")
    low, high = zip(*((mean - part, mean + part) for mean, part in zip(means, deviations, strict=True)), strict=True)
    axes.fill_between(steps, low, high, alpha=0.2, linewidth=0)


def _draw_evaluations(axes: Any, evaluations: Sequence[tuple[int, float, float, float]]) -> None:
    """The mean reward on the held-out tasks, with a bar for its confidence interval: steps, means and bounds, those of
    versions that were held too."""
    steps, means, lows, highs = zip(*evaluations, strict=True)
    below = [mean - low for mean, low in zip(means, lows, strict=True)]
    above = [high - mean for mean, high in zip(means, highs, strict=True)]
    axes.errorbar(steps, means, yerr=(below, above), marker=".", linewidth=1.2, capsize=2, elinewidth=0.8)
    _label(axes, "evaluation (mean, 95 % interval)")


def _series(reports: Sequence[UpdateReport], metric: str) -> list[float]:
    """One number for each report; NaN if it has none."""
    return [report.metrics.get(metric, math.nan) for report in reports]


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
