"""The curves of a training run as a PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.core import UpdateReport

_PANELS = {
    "loss": "loss",
    "kl": "KL from the base (nats a token)",
    "entropy": "entropy (nats a token)",
    "clip_fraction": "clipped tokens (fraction)",
    "tokens_per_second": "tokens drawn a second",
}
_MARKERS_UP_TO = 60
"""Points; more are drawn as a line alone."""


def draw(reports: Sequence[UpdateReport], path: Path, title: str) -> None:
    """Writes the curves, whole or not at all; a metric that a report lacks is a gap.

    Raises:
        OSError: the file cannot be written.
    """
    from mlx_parallm.adapters.atomic import replace_file

    buffer = io.BytesIO()
    _figure(reports, title).savefig(buffer, format="png", dpi=120)
    replace_file(path, buffer.getvalue())


def series(reports: Sequence[UpdateReport], metric: str) -> list[float]:
    """One number a report, NaN where it has none."""
    return [report.metrics.get(metric, math.nan) for report in reports]


def _figure(reports: Sequence[UpdateReport], title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)  # no window, and no state that other figures share
    reward, *others = figure.subplots(2, 3).flat
    figure.suptitle(title)
    _draw_reward(reward, reports)
    for axes, (metric, label) in zip(others, _PANELS.items(), strict=True):
        _draw(axes, reports, metric, label)
    return figure


def _draw(axes: Any, reports: Sequence[UpdateReport], metric: str, label: str) -> None:
    marker = "." if len(reports) <= _MARKERS_UP_TO else ""
    axes.plot(range(1, len(reports) + 1), series(reports, metric), marker=marker, linewidth=1.2)
    axes.set_title(label, fontsize="medium")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _draw_reward(axes: Any, reports: Sequence[UpdateReport]) -> None:
    """The mean with one standard deviation on both sides."""
    _draw(axes, reports, "reward_mean", "reward (mean ± standard deviation)")
    means, deviations = series(reports, "reward_mean"), series(reports, "reward_std")
    low, high = zip(*((mean - part, mean + part) for mean, part in zip(means, deviations, strict=True)), strict=True)
    axes.fill_between(range(1, len(reports) + 1), low, high, alpha=0.2, linewidth=0)
