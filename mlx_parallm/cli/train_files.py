"""The files of a training run: its updates as lines of JSON, and its curves as a PNG."""

from __future__ import annotations

import io
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mlx_parallm.core import UpdateReport
from mlx_parallm.errors import ConfigError

_log = logging.getLogger(__name__)

_PANELS = {
    "loss": "loss",
    "kl": "KL from the base (nats a token)",
    "entropy": "entropy (nats a token)",
    "clip_fraction": "clipped tokens (fraction)",
    "tokens_per_second": "tokens drawn a second",
}
_MAX_MARKERS = 60
"""Curves with more points are drawn as a line without markers."""


class UpdateLog:
    """A JSONL file to which updates are appended, each in one write. A context manager.

    If the disk refuses a line, the log ends with a warning and the run continues.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--log: {path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, step: int, report: UpdateReport, failures: Sequence[str] = ()) -> None:
        """Appends one line: the fields of `log_entry`, and `at`, the Unix time in seconds."""
        if self._file.closed:
            return
        text = json.dumps({"at": round(time.time(), 3), **log_entry(step, report, failures)}) + "\n"
        try:
            self._file.write(text.encode())
        except OSError as error:
            _log.warning("%s takes no more lines: %s", self.path, error.strerror)
            self._file.close()


def log_entry(step: int, report: UpdateReport, failures: Sequence[str] = ()) -> dict[str, object]:
    """An update as JSON: its metrics by name (null if not finite), and the fields below.

    `step` counts the updates of the run, `optimizer_step` those of the adapter. `failures` are the reasons of the tasks
    of this step that failed.
    """
    metrics = {name: value if math.isfinite(value) else None for name, value in report.metrics.items()}
    return {
        **metrics,
        "step": step,
        "optimizer_step": report.step,
        "status": report.status,
        "reason": report.reason,
        "adapter": report.adapter.name if report.adapter else None,
        "version": report.adapter.version if report.adapter else None,
        "checkpoint": report.checkpoint,
        "failures": list(failures),
    }


# -- curves --------------------------------------------------------------------------------------


def draw_curves(reports: Sequence[UpdateReport], path: Path, title: str) -> None:
    """Writes the PNG, whole or not at all. A metric that a report lacks is a gap in its curve.

    Raises:
        OSError: the file cannot be written.
    """
    from mlx_parallm.adapters.checkpoints.atomic import replace_file

    buffer = io.BytesIO()
    _figure(reports, title).savefig(buffer, format="png", dpi=120)
    replace_file(path, buffer.getvalue())


def _figure(reports: Sequence[UpdateReport], title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)  # opens no window, and shares no state with other figures
    reward, *others = figure.subplots(2, 3).flat
    figure.suptitle(title)
    _draw_reward(reward, reports)
    for axes, (metric, label) in zip(others, _PANELS.items(), strict=True):
        _draw(axes, reports, metric, label)
    return figure


def _draw(axes: Any, reports: Sequence[UpdateReport], metric: str, label: str) -> None:
    marker = "." if len(reports) <= _MAX_MARKERS else ""
    axes.plot(range(1, len(reports) + 1), _series(reports, metric), marker=marker, linewidth=1.2)
    axes.set_title(label, fontsize="medium")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _draw_reward(axes: Any, reports: Sequence[UpdateReport]) -> None:
    """The mean reward, with a band of one standard deviation on each side."""
    _draw(axes, reports, "reward_mean", "reward (mean ± standard deviation)")
    means, deviations = _series(reports, "reward_mean"), _series(reports, "reward_std")
    low, high = zip(*((mean - part, mean + part) for mean, part in zip(means, deviations, strict=True)), strict=True)
    axes.fill_between(range(1, len(reports) + 1), low, high, alpha=0.2, linewidth=0)


def _series(reports: Sequence[UpdateReport], metric: str) -> list[float]:
    """One number for each report; NaN if it has none."""
    return [report.metrics.get(metric, math.nan) for report in reports]
