"""The texts of a training run: the lines of its table, its summary, spark lines and samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_parallm.rl.status import LEVEL_PREFIX, EvaluationResult, UpdateReport

if TYPE_CHECKING:
    from mlx_parallm.rl.runs.metrics import Made

_MISSING = "-"
_GAP = "  "
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Column:
    """A metric in the table: its heading, the width of its cells, and the format of its number."""

    title: str
    metric: str
    width: int
    form: str


_COLUMNS = (
    Column("loss", "loss", 8, "+.4f"),
    Column("grad", "grad_norm", 7, ".3f"),
    Column("KL", "kl", 6, ".4f"),
    Column("entropy", "entropy", 7, ".3f"),
    Column("clip", "clip_fraction", 5, ".3f"),
    Column("length", "completion_tokens", 6, ".0f"),
    Column("tok/s", "tokens_per_second", 6, ".0f"),
    Column("seconds", "seconds", 7, ".1f"),
)
_STEP_WIDTH, _REWARD_WIDTH, _EVALUATION_WIDTH, _LEFT_WIDTH, _LEVEL_WIDTH = 9, 15, 20, 6, 24


def heading(evaluates: bool = False) -> str:
    """The first line of the table. `evaluates`: it has a column for evaluations."""
    titles = [f"{column.title:>{column.width}}" for column in _COLUMNS]
    evaluation = [f"{'evaluation':>{_EVALUATION_WIDTH}}"] if evaluates else []
    first = [f"{'step':>{_STEP_WIDTH}}", f"{'reward':>{_REWARD_WIDTH}}", *evaluation]
    return _GAP.join([*first, *titles, f"{'left':>{_LEFT_WIDTH}}", "result"])


def line(
    step: int, steps: int | None, report: UpdateReport, left_s: float | None = None, evaluates: bool = False
) -> str:
    """The table's line for step `step` of `steps` (None: the run has no end). Metrics that the report lacks are dashes.

    `left_s`: seconds that the rest of the run will take; None if that is unknown.
    """
    cells = [f"{_number(report, column.metric, column.form):>{column.width}}" for column in _COLUMNS]
    evaluation = [f"{evaluation_text(report) or _MISSING:>{_EVALUATION_WIDTH}}"] if evaluates else []
    number = str(step) if steps is None else f"{step}/{steps}"
    first = [f"{number:>{_STEP_WIDTH}}", f"{_reward(report):>{_REWARD_WIDTH}}", *evaluation]
    left = _MISSING if left_s is None else duration(left_s)
    return _GAP.join([*first, *cells, f"{left:>{_LEFT_WIDTH}}", _result(report)])


def evaluation_text(report: UpdateReport) -> str:
    """The evaluation in the report with its interval; empty if there is none."""
    mean, low, high = (report.metrics.get(f"eval_{figure}") for figure in ("mean", "low", "high"))
    return "" if mean is None or low is None or high is None else with_interval(mean, low, high)


def first_evaluation_text(result: EvaluationResult) -> str:
    """The line for the version that the run starts from."""
    figures = with_interval(result.mean, result.low, result.high)
    failed = f", failed tasks: {result.failed}" if result.failed else ""
    return f"evaluation of {result.adapter} before the first step: {figures}, {result.answers} answers{failed}"


def level_lines(report: UpdateReport) -> list[str]:
    """A line for each level of the curriculum, with its success and its share of the tasks."""
    metrics, end = report.metrics, "/success"
    keys = [name.removesuffix(end) for name in metrics if name.startswith(LEVEL_PREFIX) and name.endswith(end)]
    names = [one_line(key.removeprefix(LEVEL_PREFIX), _LEVEL_WIDTH) for key in keys]
    width = max(map(len, names), default=0)
    return [
        f"level {name:<{width}}  success {metrics[key + end]:.2f}, {metrics[key + '/share']:.0%} of the tasks"
        for key, name in zip(keys, names, strict=True)
    ]


def with_interval(mean: float, low: float, high: float) -> str:
    """A mean with the bounds of its confidence interval."""
    return f"{mean:.3f} [{low:.2f}, {high:.2f}]"


def summary(made: Sequence[Made]) -> str:
    """A run in one sentence: updates by status, first and last mean reward and evaluation, and the newest version."""
    reports = [each.report for each in made if each.is_update]
    counts = Counter(report.status for report in reports)
    parts = [", ".join(f"{count} {status}" for status, count in counts.items()) or "no update was made"]
    if rewards := [mean for report in reports if (mean := report.metrics.get("reward_mean")) is not None]:
        parts.append(f"mean reward {rewards[0]:.3f} in the first, {rewards[-1]:.3f} in the last")
    # that of a held update is of a version that is not kept; the last one may come with an update that was skipped
    evaluations = [
        with_interval(*each.evaluation) for each in made if each.evaluation is not None and each.report.status != "held"
    ]
    if evaluations:
        parts.append(" then ".join([f"evaluation {evaluations[0]}", *evaluations[1:][-1:]]))
    if versions := [report.adapter for report in reports if _is_published(report)]:
        parts.append(f"newest version {versions[-1]}")
    return "; ".join(parts)


def _is_published(report: UpdateReport) -> bool:
    return report.status == "published" and report.adapter is not None


def _number(report: UpdateReport, metric: str, form: str) -> str:
    value = report.metrics.get(metric)
    return _MISSING if value is None else format(value, form)


def _reward(report: UpdateReport) -> str:
    mean, deviation = (_number(report, f"reward_{part}", ".3f") for part in ("mean", "std"))
    return _MISSING if mean == _MISSING else f"{mean} ± {deviation}"


def _result(report: UpdateReport) -> str:
    """The new version, or what came of the update instead; and the checkpoint, if one was saved. A reason in words has
    a line of its own."""
    result = str(report.adapter) if _is_published(report) else report.status
    reason = f": {report.reason}" if report.reason and not _in_words(report.reason) else ""
    return f"{result}{reason}" + (f", {report.checkpoint}" if report.checkpoint else "")


def reason_line(report: UpdateReport) -> str:
    """The line below that of an update: why there is no new version. Empty if its own line has said it."""
    return f"{'':>{_STEP_WIDTH}}{_GAP}{report.status}: {report.reason}" if _in_words(report.reason) else ""


def _in_words(reason: str) -> bool:
    return " " in reason


# -- small texts ---------------------------------------------------------------------------------


def spark(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as bars between their least (the lowest bar) and their greatest (the highest one)."""
    finite = [value for value in values if math.isfinite(value)][-width:]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if low == high:
        return _BARS[0] * len(finite)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in finite)


def duration(seconds: float) -> str:
    """Rounded for people: `45s`, `3m10s`, `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def one_line(text: str, width: int) -> str:
    """The text without line breaks and control characters, cut to `width` characters."""
    plain = "".join(character if character.isprintable() else " " for character in text[: 4 * width])
    words = " ".join(plain.split())
    return words if len(words) <= width and len(text) <= 4 * width else words[: width - 1] + "…"
