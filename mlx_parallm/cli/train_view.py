"""Shows a training run: a table, and below it on a terminal progress, spark lines and samples; at the end a summary in
one sentence, and the curves of the whole run as a PNG."""

from __future__ import annotations

import io
import math
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from mlx_parallm.cli.show import with_interval
from mlx_parallm.rl.status import LEVEL_PREFIX, EvaluationResult, UpdateReport

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mlx_parallm.app.training_run import SampleText
    from mlx_parallm.rl.tracking import Made

# -- the table -------------------------------------------------------------------------------------

_WIDTHS = {"step": 9, "reward": 15, "evaluation": 20, "loss": 8, "perplexity": 10, "accuracy": 8, "held-out": 8}
_WIDTHS |= {"grad": 7, "KL": 6, "entropy": 7, "clip": 5, "length": 6, "tok/s": 6, "seconds": 7, "left": 6}
"""Widths of the columns, by their titles. The last column, the result, has none."""
_METRICS = {
    "loss": ("loss", "+.4f"),
    "perplexity": ("perplexity", ".2f"),
    "accuracy": ("preference_accuracy", ".3f"),
    "held-out": ("held_out_loss", ".4f"),
    "grad": ("grad_norm", ".3f"),
    "KL": ("kl", ".4f"),
    "entropy": ("entropy", ".3f"),
    "clip": ("clip_fraction", ".3f"),
    "length": ("completion_tokens", ".0f"),
    "tok/s": ("tokens_per_second", ".0f"),
    "seconds": ("seconds", ".1f"),
}
"""The columns that show a metric, and the format of its number."""
_OF_FILES = {"sft": {"perplexity", "held-out"}, "dpo": {"accuracy", "held-out"}, "kto": {"accuracy", "held-out"}}
_OF_ROLLOUTS = {"reward", "KL", "entropy", "clip"}
_LEVEL_WIDTH = 24
_BARS = "▁▂▃▄▅▆▇█"


def columns_of(kind: str | None = None, evaluates: bool = False) -> Sequence[str]:
    """The titles of a table's columns. `kind`: of the file that the run learns from; None: it learns from rollouts.
    `evaluates`: there is one for evaluations."""
    wanted = _OF_ROLLOUTS if kind is None else _OF_FILES[kind]
    special = {"evaluation", *_OF_ROLLOUTS}.union(*_OF_FILES.values())
    wanted = wanted | ({"evaluation"} if evaluates else set())
    return [title for title in _WIDTHS if title in wanted or title not in special]


_USUAL = columns_of()


def heading(columns: Sequence[str] = _USUAL) -> str:
    """The first line of the table."""
    return _row({title: title for title in _WIDTHS}, "result", columns)


def line(
    step: int, steps: int | None, report: UpdateReport, left_s: float | None = None, columns: Sequence[str] = _USUAL
) -> str:
    """The table's line for step `step` of `steps` (None: the run has no end). Metrics that the report lacks are dashes.

    `left_s`: seconds that the rest of the run will take; None if that is unknown.
    """
    mean, deviation = (_number(report, f"reward_{part}", ".3f") for part in ("mean", "std"))
    cells = {
        "step": str(step) if steps is None else f"{step}/{steps}",
        "reward": mean if mean == "-" else f"{mean} ± {deviation}",
        "evaluation": "-" if report.evaluation is None else with_interval(*report.evaluation),
        **{title: _number(report, *metric) for title, metric in _METRICS.items()},
        "left": "-" if left_s is None else duration(left_s),
    }
    return _row(cells, _result(report), columns)


def _row(cells: Mapping[str, str], result: str, columns: Sequence[str]) -> str:
    shown = (f"{cells[title]:>{_WIDTHS[title]}}" for title in columns)
    return "  ".join((*shown, result))


def _number(report: UpdateReport, metric: str, form: str) -> str:
    value = report.metrics.get(metric)
    return "-" if value is None else format(value, form)


def _result(report: UpdateReport) -> str:
    """The new version, or what came of the update instead; and the checkpoint, if one was saved. A reason in words has
    a line of its own."""
    result = str(report.adapter) if _is_published(report) else report.status
    reason = f": {report.reason}" if report.reason and not _in_words(report.reason) else ""
    return f"{result}{reason}" + (f", {report.checkpoint}" if report.checkpoint else "")


def _is_published(report: UpdateReport) -> bool:
    return report.status == "published" and report.adapter is not None


def reason_line(report: UpdateReport) -> str:
    """The line below that of an update: why there is no new version. Empty if its own line has said it."""
    return f"{'':>{_WIDTHS['step']}}  {report.status}: {report.reason}" if _in_words(report.reason) else ""


def _in_words(reason: str) -> bool:
    return " " in reason


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


def summary(made: Sequence[Made]) -> str:
    """A run in one sentence: updates by status, first and last mean reward and evaluation, and the newest version."""
    reports = [each.report for each in made if each.is_update]
    counts = Counter(report.status for report in reports)
    parts = [", ".join(f"{count} {status}" for status, count in counts.items()) or "no update was made"]
    if rewards := [mean for report in reports if (mean := report.metrics.get("reward_mean")) is not None]:
        parts.append(f"mean reward {rewards[0]:.3f} in the first, {rewards[-1]:.3f} in the last")
    # that of a held update is of a version that is not kept; the last one may come with an update that was skipped
    evaluations = [
        with_interval(*each.report.evaluation)
        for each in made
        if each.report.evaluation is not None and each.report.status != "held"
    ]
    parts += [text for name, label in _LOSSES.items() if (text := _first_and_last(reports, name, label))]
    if evaluations:
        parts.append(" then ".join([f"evaluation {evaluations[0]}", *evaluations[1:][-1:]]))
    if versions := [report.adapter for report in reports if _is_published(report)]:
        parts.append(f"newest version {versions[-1]}")
    return "; ".join(parts)


_LOSSES = {"perplexity": "perplexity", "preference_accuracy": "accuracy", "held_out_loss": "held-out loss"}
"""Metrics that the summary of a run on a file names."""


def _first_and_last(reports: Sequence[UpdateReport], metric: str, label: str) -> str:
    values = [value for report in reports if (value := report.metrics.get(metric)) is not None]
    return f"{label} {values[0]:.4g} first, {values[-1]:.4g} last" if values else ""


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


# -- on the screen ---------------------------------------------------------------------------------

_STEPS_TIMED = 10
"""The time that is left is estimated from so many steps."""

_KEPT = 20_000
"""Figures that are kept for spark lines. A run without an end has more."""

_SAMPLES_EVERY = 10
"""Where there is no terminal, samples are printed in the first step and then so often."""

_LABEL_WIDTH, _PROMPT_WIDTH, _TEXT_WIDTH = 10, 48, 72


class RichTrainView:
    """Implements `app.training_run.TrainView`: writes to `stream` (default: stdout), with styles and progress bars on
    a terminal and plain lines elsewhere.

    A context manager: on a terminal, everything that is printed inside it after `started` appears above the bars.

    Args:
        steps: of the whole run; None: it has no end.
        columns: of the table; see `columns_of`.
    """

    def __init__(self, steps: int | None, stream: TextIO | None = None, columns: Sequence[str] = _USUAL) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._steps = steps
        self._columns = columns
        self._console = Console(file=stream or sys.stdout, highlight=False)
        left = TextColumn("{task.fields[left]}")
        parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
        self._progress = Progress(*parts, console=self._console)
        self._updates = self._progress.add_task("updates", total=steps, left="")
        self._rollout = self._progress.add_task("rollout", total=None, left="", visible="reward" in columns)
        self._rewards = deque[float](maxlen=_KEPT)
        self._losses = deque[float](maxlen=_KEPT)
        self._evaluations = deque[float](maxlen=_KEPT)
        self._evaluation = ""
        self._samples: tuple[SampleText, ...] = ()
        self._levels: list[str] = []
        self._advice = ""
        self._seconds = deque[float](maxlen=_STEPS_TIMED)
        self.steps_done = 0
        self.folder: Path | None = None  # of the run that has started
        self._live = Live(console=self._console, get_renderable=self._below)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def started(self, facts: Mapping[str, str], steps_done: int, folder: Path) -> None:
        self.steps_done, self.folder = steps_done, folder
        if self._console.is_terminal:
            self._live.start()
        self._progress.update(self._updates, completed=steps_done)
        width = max(map(len, facts), default=0)
        for name, fact in facts.items():
            self._print(f"{name:<{width}}  {fact}")
        self._print("")
        if steps_done and self._steps is None:
            self._print(f"{steps_done} steps were made before")
        elif steps_done and self._steps is not None:
            rest = f"{self._steps - steps_done} are left" if self._steps > steps_done else "raise --steps to continue"
            self._print(f"{steps_done} of {self._steps} steps were made before; {rest}")
        self._print(heading(self._columns), "bold")

    def evaluated(self, result: EvaluationResult) -> None:
        self._evaluations.append(result.mean)
        self._evaluation = first_evaluation_text(result)
        self._print(self._evaluation)

    def rollout(self, done: int, wanted: int) -> None:
        self._progress.update(self._rollout, completed=done, total=wanted)

    def task_failed(self, reason: str) -> None:
        self._print(f"FAILED {reason}", "red")

    def sampled(self, best: SampleText, worst: SampleText) -> None:
        self._samples = (best, worst)

    def updated(self, report: UpdateReport) -> None:
        self.steps_done += 1
        self._remember(report)
        for found in report.divergences:
            if report.status != "held" or found.reason not in report.reason:
                self._print(f"DIVERGES {found.reason} ({found.action})", "red")
        if report.advice and report.advice != self._advice:
            self._print(f"PLATEAU {report.advice}", "yellow")
        self._advice = report.advice
        style = {"held": "yellow", "skipped": "yellow"}.get(report.status, "")
        left = self._left_s
        self._print(line(self.steps_done, self._steps, report, left, columns=self._columns), style)
        if reason := reason_line(report):
            self._print(reason, style)
        if not self._console.is_terminal and self.steps_done % _SAMPLES_EVERY == 1:
            for text in (*self._levels, *self._sample_lines()):
                self._print(text)
        self._progress.update(
            self._updates, completed=self.steps_done, left="" if left is None else f"{duration(left)} left"
        )

    def _remember(self, report: UpdateReport) -> None:
        metrics, self._levels = report.metrics, level_lines(report)
        if (reward := metrics.get("reward_mean")) is not None:
            self._rewards.append(reward)
        if report.evaluation is not None:
            self._evaluations.append(report.evaluation[0])
            self._evaluation = f"{with_interval(*report.evaluation)} after step {self.steps_done}"
        elif (loss := metrics.get("loss")) is not None:
            self._losses.append(loss)
        if (seconds := metrics.get("seconds")) is not None:
            self._seconds.append(seconds)

    @property
    def _left_s(self) -> float | None:
        """Seconds that the steps that are left will take if they take as long as the last ones."""
        if self._steps is None or not self._seconds:
            return None
        return (self._steps - self.steps_done) * fmean(self._seconds)

    # -- below the table, on a terminal ----------------------------------------------------------

    def _below(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(text, no_wrap=True, overflow="ellipsis", style="dim") for text in self._texts_below()]
        return Group(self._progress, *lines)

    def _texts_below(self) -> Iterator[str]:
        if self._rewards:
            now = f"{self._rewards[0]:.3f} to {self._rewards[-1]:.3f}"
            yield f"{'reward':<{_LABEL_WIDTH}}  {spark(self._rewards)}  {now}"
        elif self._losses:
            yield f"{'loss':<{_LABEL_WIDTH}}  {spark(self._losses)}  {self._losses[0]:.3f} to {self._losses[-1]:.3f}"
        if self._evaluations:
            yield f"{'evaluation':<{_LABEL_WIDTH}}  {spark(self._evaluations)}  {self._evaluation}"
        yield from self._levels
        yield from self._sample_lines()

    def _sample_lines(self) -> Iterator[str]:
        for label, sample in zip(("best", "worst"), self._samples, strict=False):
            prompt, text = one_line(sample.prompt, _PROMPT_WIDTH), one_line(sample.text, _TEXT_WIDTH)
            yield f"{label:<{_LABEL_WIDTH}}  {sample.reward:.2f}  {prompt} → {text or '(empty)'}"

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style), soft_wrap=True)


# -- curves ----------------------------------------------------------------------------------------

_PANELS = {
    "loss": "loss",
    "kl": "KL from the base (nats a token)",
    "entropy": "entropy (nats a token)",
    "completion_tokens": "length of answers (tokens, mean)",
    "clip_fraction": "clipped tokens (fraction)",
    "tokens_per_second": "tokens sampled a second",
}
_FILE_PANELS = {
    "loss": "loss",
    "perplexity": "perplexity",
    "preference_accuracy": "accuracy (pairs in order, verdicts kept)",
    "kl": _PANELS["kl"],
    "grad_norm": "norm of the gradient",
    "completion_tokens": _PANELS["completion_tokens"],
    "tokens_per_second": "tokens trained a second",
}
_HELD_OUT = {"loss": "held_out_loss", "perplexity": "held_out_perplexity", "preference_accuracy": "held_out_accuracy"}
"""The metric of held-out rows that is drawn with another one."""
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
    evaluations = [(each.step, *found) for each in made if (found := each.report.evaluation) is not None]
    figure = Figure(figsize=(16, 6.5), layout="constrained")
    FigureCanvasAgg(figure)  # opens no window, and shares no state with other figures
    figure.suptitle(title)
    axes = iter(figure.subplots(2, 4).flat)
    panels = _PANELS
    if any("rows" in report.metrics for report in reports):
        known = {metric for report in reports for metric in report.metrics}
        panels = {metric: label for metric, label in _FILE_PANELS.items() if metric in known}
    else:
        _draw_reward(next(axes), steps, reports)
    if evaluations:
        _draw_evaluations(next(axes), evaluations)
    for metric, label in panels.items():
        panel = next(axes)
        _draw(panel, steps, _series(reports, metric), label)
        _draw_held_out(panel, made, metric)
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


def _draw_held_out(axes: Any, made: Sequence[Made], metric: str) -> None:
    """The curve of the same metric on held-out rows, which is known before the first step too."""
    name = _HELD_OUT.get(metric, "")
    known = [(each.step, value) for each in made if (value := each.report.metrics.get(name)) is not None]
    if known:
        axes.lines[-1].set_label("trained rows")
        axes.plot(*zip(*known, strict=True), marker=".", linewidth=1.2, label="held-out rows")
        axes.legend()


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
