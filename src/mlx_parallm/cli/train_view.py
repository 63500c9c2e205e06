"""A training run as its operator sees it: a table that grows a line a step, and on a terminal progress bars."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from mlx_parallm.cli.train_table import heading, line
from mlx_parallm.core import UpdateReport


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What a run does, beside its configuration.

    Each of `steps` draws `prompts_per_step` groups of `group_size` trajectories from `environment`, and makes one
    update of them. Steps that a resumed run made before count.
    """

    environment: str
    steps: int
    group_size: int
    prompts_per_step: int


class TrainView(Protocol):
    """What a run tells, all from one thread. No call raises or waits."""

    def started(self, facts: Mapping[str, str], made: int) -> None:
        """The model is loaded, nothing is drawn yet. `facts`: short names and what to say, in order. `made`: steps
        that the run has made before."""
        ...

    def rollout(self, done: int, wanted: int) -> None:
        """Of the step under way `done` of `wanted` trajectories are drawn."""
        ...

    def task_failed(self, reason: str) -> None:
        """A task of the step under way could not be answered, or its answers not scored."""
        ...

    def updated(self, report: UpdateReport) -> None:
        """One step has ended, whatever came of it.

        Shown of its metrics are reward_mean, reward_std, loss, kl, entropy, clip_fraction, tokens_per_second (drawn
        in this step) and seconds (of the whole step).
        """
        ...


class RichTrainView:
    """Writes to `stream` (stdout): styles and progress bars on a terminal, plain lines elsewhere.

    A context manager; while it is entered on a terminal, what others print goes above the bars.
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
        self._ended = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, facts: Mapping[str, str], made: int) -> None:
        self._ended = made
        self._progress.update(self._updates, completed=made)
        width = max(map(len, facts), default=0)
        for name, fact in facts.items():
            self._print(f"{name:<{width}}  {fact}")
        self._print("")
        if made:
            left = f"{self._steps - made} are left" if self._steps > made else "give more to go on"
            self._print(f"{made} of {self._steps} steps were made before; {left}")
        self._print(heading(), "bold")

    def rollout(self, done: int, wanted: int) -> None:
        self._progress.update(self._rollout, completed=done, total=wanted)

    def task_failed(self, reason: str) -> None:
        self._print(f"FAILED {reason}", "red")

    def updated(self, report: UpdateReport) -> None:
        self._ended += 1
        style = {"held": "yellow", "skipped": "yellow"}.get(report.status, "")
        self._print(line(self._ended, self._steps, report), style)
        self._progress.update(self._updates, completed=self._ended)

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style), soft_wrap=True)
