"""Updates as lines of a table, and a run in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.core import UpdateReport

_MISSING = "-"
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One metric: its heading, the width of its cells, and how its number is written."""

    title: str
    metric: str
    width: int
    form: str


COLUMNS = (
    Column("loss", "loss", 8, "+.4f"),
    Column("KL", "kl", 6, ".4f"),
    Column("entropy", "entropy", 7, ".3f"),
    Column("clip", "clip_fraction", 5, ".3f"),
    Column("tok/s", "tokens_per_second", 6, ".0f"),
    Column("seconds", "seconds", 7, ".1f"),
)
_STEP_WIDTH, _REWARD_WIDTH = 9, 15


def heading() -> str:
    """The table's first line."""
    titles = [f"{column.title:>{column.width}}" for column in COLUMNS]
    return _GAP.join([f"{'step':>{_STEP_WIDTH}}", f"{'reward':>{_REWARD_WIDTH}}", *titles, "result"])


def line(step: int, steps: int, report: UpdateReport) -> str:
    """The line of one step of `steps`; metrics that the report lacks are dashes."""
    cells = [f"{_number(report, column.metric, column.form):>{column.width}}" for column in COLUMNS]
    place = f"{f'{step}/{steps}':>{_STEP_WIDTH}}"
    return _GAP.join([place, f"{_reward(report):>{_REWARD_WIDTH}}", *cells, _result(report)])


def summary(reports: Sequence[UpdateReport]) -> str:
    """What became of the updates, the reward at both ends, and the last version that went live."""
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
    """The version that went live, or why none did; and the checkpoint, where one was saved."""
    done = str(report.adapter) if _is_live(report) else report.status
    reason = f": {report.reason}" if report.reason else ""
    return f"{done}{reason}" + (f", {report.checkpoint}" if report.checkpoint else "")
