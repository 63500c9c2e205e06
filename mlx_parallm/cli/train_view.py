"""Shows a training run: a table, and below it on a terminal progress, spark lines and samples."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from mlx_parallm.cli.train_table import (
    duration,
    evaluation_text,
    first_evaluation_text,
    heading,
    level_lines,
    line,
    one_line,
    reason_line,
    spark,
)
from mlx_parallm.rl.status import EvaluationResult, UpdateReport

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mlx_parallm.app.train_progress import SampleText

_STEPS_TIMED = 10
"""The time that is left is estimated from so many steps."""

_KEPT = 20_000
"""Figures that are kept for spark lines. A run without an end has more."""

_SAMPLES_EVERY = 10
"""Where there is no terminal, samples are printed in the first step and then so often."""

_LABEL_WIDTH, _PROMPT_WIDTH, _TEXT_WIDTH = 10, 48, 72


class RichTrainView:
    """Implements `app.train_progress.TrainView`: writes to `stream` (default: stdout), with styles and progress bars on
    a terminal and plain lines elsewhere.

    A context manager: on a terminal, everything that is printed inside it after `started` appears above the bars.

    Args:
        steps: of the whole run; None: it has no end.
        evaluates: whether versions are evaluated.
    """

    def __init__(self, steps: int | None, stream: TextIO | None = None, evaluates: bool = False) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._steps = steps
        self._evaluates = evaluates
        self._console = Console(file=stream or sys.stdout, highlight=False)
        left = TextColumn("{task.fields[left]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
        self._progress = Progress(*columns, console=self._console)
        self._updates = self._progress.add_task("updates", total=steps, left="")
        self._rollout = self._progress.add_task("rollout", total=None, left="")
        self._rewards = deque[float](maxlen=_KEPT)
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
        self._print(heading(self._evaluates), "bold")

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
        self._print(line(self.steps_done, self._steps, report, left, self._evaluates), style)
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
        if text := evaluation_text(report):
            self._evaluations.append(metrics["eval_mean"])
            self._evaluation = f"{text} after step {self.steps_done}"
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
