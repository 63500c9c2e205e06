"""Shows and records a training run: a table with progress bars, a JSONL file of its updates, and a PNG of curves."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from mlx_parallm.core import UpdateReport
from mlx_parallm.errors import ConfigError

_log = logging.getLogger(__name__)

_MISSING = "-"
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A metric in the table: its heading, the width of its cells, and the format of its number."""

    title: str
    metric: str
    width: int
    form: str


_COLUMNS = (
    Column("loss", "loss", 8, "+.4f"),
    Column("KL", "kl", 6, ".4f"),
    Column("entropy", "entropy", 7, ".3f"),
    Column("clip", "clip_fraction", 5, ".3f"),
    Column("tok/s", "tokens_per_second", 6, ".0f"),
    Column("seconds", "seconds", 7, ".1f"),
)
_STEP_WIDTH, _REWARD_WIDTH = 9, 15


class RichTrainView:
    """Implements `app.train.TrainView`: writes to `stream` (default: stdout), with styles and progress bars on a
    terminal and plain lines elsewhere.

    A context manager: on a terminal, everything that is printed inside it appears above the bars.
    """

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._steps = steps
        self._console = Console(file=stream or sys.stdout, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._updates = self._progress.add_task("updates", total=steps)
        self._rollout = self._progress.add_task("rollout", total=None)
        self.steps_done = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, facts: Mapping[str, str], steps_done: int) -> None:
        self.steps_done = steps_done
        self._progress.update(self._updates, completed=steps_done)
        width = max(map(len, facts), default=0)
        for name, fact in facts.items():
            self._print(f"{name:<{width}}  {fact}")
        self._print("")
        if steps_done:
            rest = f"{self._steps - steps_done} are left" if self._steps > steps_done else "raise --steps to continue"
            self._print(f"{steps_done} of {self._steps} steps were made before; {rest}")
        self._print(heading(), "bold")

    def rollout(self, done: int, wanted: int) -> None:
        self._progress.update(self._rollout, completed=done, total=wanted)

    def task_failed(self, reason: str) -> None:
        self._print(f"FAILED {reason}", "red")

    def updated(self, report: UpdateReport) -> None:
        self.steps_done += 1
        style = {"held": "yellow", "skipped": "yellow"}.get(report.status, "")
        self._print(line(self.steps_done, self._steps, report), style)
        self._progress.update(self._updates, completed=self.steps_done)

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style), soft_wrap=True)


# -- the table -----------------------------------------------------------------------------------


def heading() -> str:
    """The first line of the table."""
    titles = [f"{column.title:>{column.width}}" for column in _COLUMNS]
    return _GAP.join([f"{'step':>{_STEP_WIDTH}}", f"{'reward':>{_REWARD_WIDTH}}", *titles, "result"])


def line(step: int, steps: int, report: UpdateReport) -> str:
    """The table's line for step `step` of `steps`. Metrics that the report lacks are dashes."""
    cells = [f"{_number(report, column.metric, column.form):>{column.width}}" for column in _COLUMNS]
    step_cell = f"{f'{step}/{steps}':>{_STEP_WIDTH}}"
    return _GAP.join([step_cell, f"{_reward(report):>{_REWARD_WIDTH}}", *cells, _result(report)])


def summary(reports: Sequence[UpdateReport]) -> str:
    """A run in one sentence: the updates by status, the first and last mean reward, and the live version."""
    counts = Counter(report.status for report in reports)
    parts = [", ".join(f"{count} {status}" for status, count in counts.items()) or "no update was made"]
    if rewards := [mean for report in reports if (mean := report.metrics.get("reward_mean")) is not None]:
        parts.append(f"mean reward {rewards[0]:.3f} in the first, {rewards[-1]:.3f} in the last")
    if versions := [report.adapter for report in reports if _is_live(report)]:
        parts.append(f"{versions[-1]} is live")
    return "; ".join(parts)


def _is_live(report: UpdateReport) -> bool:
    return report.status == "published" and report.adapter is not None


def _number(report: UpdateReport, metric: str, form: str) -> str:
    value = report.metrics.get(metric)
    return _MISSING if value is None else format(value, form)


def _reward(report: UpdateReport) -> str:
    mean, deviation = (_number(report, f"reward_{part}", ".3f") for part in ("mean", "std"))
    return _MISSING if mean == _MISSING else f"{mean} ± {deviation}"


def _result(report: UpdateReport) -> str:
    """The version that went live, or the reason why none did; and the checkpoint, if one was saved."""
    result = str(report.adapter) if _is_live(report) else report.status
    reason = f": {report.reason}" if report.reason else ""
    return f"{result}{reason}" + (f", {report.checkpoint}" if report.checkpoint else "")


# -- the log of updates --------------------------------------------------------------------------


class UpdateLog:
    """A JSONL file to which updates are appended, each in one write.

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

    def close(self) -> None:
        self._file.close()

    def write(self, step: int, report: UpdateReport, failures: Sequence[str]) -> None:
        """Appends one line: the metrics by name (null if not finite), and the fields below.

        Args:
            step: counts the updates of the run; the field `optimizer_step` counts those of the adapter.
            failures: the reasons of the tasks of this step that failed.
        """
        if self._file.closed:
            return
        adapter = report.adapter
        fields = {
            "at": round(time.time(), 3),
            **{name: value if math.isfinite(value) else None for name, value in report.metrics.items()},
            "step": step,
            "optimizer_step": report.step,
            "status": report.status,
            "reason": report.reason,
            "adapter": adapter.name if adapter else None,
            "version": adapter.version if adapter else None,
            "checkpoint": report.checkpoint,
            "failures": list(failures),
        }
        try:
            self._file.write((json.dumps(fields) + "\n").encode())
        except OSError as error:
            _log.warning("%s takes no more lines: %s", self.path, error.strerror)
            self._file.close()


# -- curves --------------------------------------------------------------------------------------

_PANELS = {
    "loss": "loss",
    "kl": "KL from the base (nats a token)",
    "entropy": "entropy (nats a token)",
    "clip_fraction": "clipped tokens (fraction)",
    "tokens_per_second": "tokens drawn a second",
}
_MAX_MARKERS = 60
"""Curves with more points are drawn as a line without markers."""


def draw_curves(reports: Sequence[UpdateReport], path: Path, title: str) -> None:
    """Writes the PNG, whole or not at all. A metric that a report lacks is a gap in its curve.

    Raises:
        OSError: the file cannot be written.
    """
    from mlx_parallm.atomic import replace_file

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
