"""The curves of a training run, as a PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.core import EvaluationResult, UpdateReport

_PANELS = {
    "loss": "loss",
    "kl": "KL from the base (nats a token)",
    "entropy": "entropy (nats a token)",
    "completion_tokens": "length of answers (tokens, mean)",
    "clip_fraction": "clipped tokens (fraction)",
    "tokens_per_second": "tokens drawn a second",
}
_MAX_MARKERS = 60
"""Curves with more points are drawn as a line without markers."""


def draw_curves(
    reports: Sequence[UpdateReport], path: Path, title: str, first: EvaluationResult | None = None, before: int = 0
) -> None:
    """Writes the PNG, whole or not at all. A metric that a report lacks is a gap in its curve.

    Args:
        first: the evaluation of the version that the run started from.
        before: steps that were made before the first report.

    Raises:
        OSError: the file cannot be written.
    """
    from mlx_parallm.atomic import replace_file

    buffer = io.BytesIO()
    figure(reports, title, first, before).savefig(buffer, format="png", dpi=120)
    replace_file(path, buffer.getvalue())


def figure(reports: Sequence[UpdateReport], title: str, first: EvaluationResult | None = None, before: int = 0) -> Any:
    """The matplotlib figure: a panel for the reward, one for evaluations if there are any, and one for each metric."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = range(before + 1, before + 1 + len(reports))
    evaluations = _evaluations(steps, reports, first, before)
    made = Figure(figsize=(16, 6.5), layout="constrained")
    FigureCanvasAgg(made)  # opens no window, and shares no state with other figures
    made.suptitle(title)
    axes = iter(made.subplots(2, 4).flat)
    _draw_reward(next(axes), steps, reports)
    if evaluations:
        _draw_evaluations(next(axes), evaluations)
    for metric, label in _PANELS.items():
        _draw(next(axes), steps, _series(reports, metric), label)
    for unused in axes:
        unused.remove()
    return made


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


_Evaluation = tuple[int, float, float, float]
"""Step, mean, and the bounds of its interval."""


def _evaluations(
    steps: Sequence[int], reports: Sequence[UpdateReport], first: EvaluationResult | None, before: int
) -> list[_Evaluation]:
    """The evaluations in order. Those of versions that did not go live are among them."""
    found = [(before, first.mean, first.low, first.high)] if first else []
    for step, report in zip(steps, reports, strict=True):
        if "eval_mean" in report.metrics:
            mean, low, high = (report.metrics[f"eval_{figure}"] for figure in ("mean", "low", "high"))
            found.append((step, mean, low, high))
    return found


def _draw_evaluations(axes: Any, evaluations: Sequence[_Evaluation]) -> None:
    """The mean reward on the held-out tasks, with a bar for its confidence interval."""
    steps, means, lows, highs = zip(*evaluations, strict=True)
    below = [mean - low for mean, low in zip(means, lows, strict=True)]
    above = [high - mean for mean, high in zip(means, highs, strict=True)]
    axes.errorbar(steps, means, yerr=(below, above), marker=".", linewidth=1.2, capsize=2, elinewidth=0.8)
    _label(axes, "evaluation (mean, 95 % interval)")


def _series(reports: Sequence[UpdateReport], metric: str) -> list[float]:
    """One number for each report; NaN if it has none."""
    return [report.metrics.get(metric, math.nan) for report in reports]
