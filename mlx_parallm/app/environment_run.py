"""EnvironmentRun: the steps of `mlx_parallm_train` on the tasks of an environment, which the adapter answers.

StepRollouts: what these steps draw. While one waits, the rollouts of the next one are drawn.

    step n     tasks 0-3 ── answers ──▶ rewards · · · wait · · · ▶ update n
    step n+1                                tasks 4-7 ── answers ──▶ rewards · ▶ update n+1

The version that answers the tasks of step n+1 is then one version old when they are trained on. It is never older: at
most one batch is drawn ahead, and a step begins no second one. A batch that was drawn ahead and has waited meanwhile is
followed by another one before its own update, because that one would have to wait as well.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mlx_parallm.app.environment_rollouts import EnvironmentRollouts
from mlx_parallm.app.training_run import STEPS, TASKS, Filled, TrainingRun
from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import GroupCard
from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.rl.environments import Environment
from mlx_parallm.rl.rollouts.answers import RolloutResult
from mlx_parallm.rl.rollouts.tasks import warm_up_batches
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.status import LEVEL_PREFIX, LevelCard, TrainingEvent
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.rl.updates.selection import REFILLS

_POLL_S = 0.05
_ROOM = 3
"""The groups of two steps are in the buffer at most. It must have room for those of three, since steps differ."""

_FIRST_TURNS = 4
"""In the first step, whose size is not known yet, an episode is expected to have at most so many turns."""


@dataclass(eq=False, slots=True)
class Batch:
    """Tasks that one version answers together: those numbered `first` to `end`, without `end`.

    Attributes:
        began: monotonic time when the first one was asked.
        drawn: answers or episodes that have ended.
        seconds: from `began` until all had ended.
        waited: whether nothing was drawn for `draw_ahead_after_s` seconds before it had all rewards.
        rewarded: done when all answers are drawn and have their rewards.
    """

    first: int
    end: int
    version: AdapterRef
    drawing: asyncio.Task[RolloutResult]
    began: float
    drawn: int = 0
    seconds: float = 0.0
    waited: bool = False
    rewarded: asyncio.Task[RolloutResult] = field(init=False)


class StepRollouts:
    """Draws the groups of one step after the other, and waits for their rewards. Event loop's thread only.

    Args:
        groups: those of one step.
        group_size: answers or episodes of a group.
        check_alive: called again and again while it waits; what it raises ends the wait.
        on_drawn: called with the number of answers or episodes of the current step that have just ended.
    """

    def __init__(
        self,
        rollouts: EnvironmentRollouts,
        service: TrainingService,
        config: RLTrainingConfig,
        groups: int,
        group_size: int,
        check_alive: Callable[[], None],
        on_drawn: Callable[[int], None],
    ) -> None:
        self._rollouts, self._service, self._config = rollouts, service, config
        self._groups, self._group_size = groups, group_size
        self._check_alive, self._on_drawn = check_alive, on_drawn
        self._first = 0  # of the current step's tasks
        self._current: Batch | None = None
        self._ahead: Batch | None = None
        self._failure: TrainingFailedError | None = None  # of the tasks that were to be drawn ahead
        self._draws_ahead = False  # in the current step, if it has to wait
        self._steps = 0  # that have ended here
        self._unscored = set[int]()

    def open(self, taken: int) -> None:
        """Begins after the first `taken` tasks."""
        self._first = taken
        self._service.add_sink(self._on_event)

    async def close(self) -> None:
        """Ends all rollouts. What was not finished is not collected."""
        await self._end(*(batch for batch in (self._current, self._ahead) if batch is not None))

    # -- one step --------------------------------------------------------------------------------

    def begin_step(self, is_last: bool) -> None:
        """Call this before the first batch of a step. `is_last`: no step follows."""
        self._draws_ahead = not is_last and self._may_draw_ahead

    @property
    def _may_draw_ahead(self) -> bool:
        """Whether groups may be one version old, and the buffer has room for those of two steps."""
        config = self._config
        has_room = _ROOM * self._trajectories_of_step <= config.trajectory_buffer_size
        return config.draw_ahead_after_s is not None and config.max_staleness > 0 and has_room

    @property
    def _trajectories_of_step(self) -> float:
        """How many trajectories a step collects: the mean of the steps so far."""
        if self._steps == 0:
            return self._groups * self._group_size * _FIRST_TURNS
        return self._service.status().trajectories_collected / self._steps

    async def next_batch(self, groups: int) -> Batch:
        """Begins to answer the next tasks: those that are being answered already, or else so many new ones.

        Raises:
            TrainingFailedError: there is no next task.
        """
        batch, self._ahead = self._ahead, None
        if batch is not None and self._service.loop().reason_against(batch.version):
            _log.warning(
                "what %s has drawn ahead is dropped: training does not continue from it any more", batch.version
            )
            await self._end(batch)
            batch = None
        if batch is None and self._failure is not None:
            raise self._failure
        self._current = batch or await self._begin(groups)
        return self._current

    async def finish(self, batch: Batch) -> RolloutResult:
        """Returns when all answers of the current batch are drawn and have their rewards.

        Raises:
            EngineDeadError: the device thread has stopped.
        """
        while not batch.rewarded.done():
            self._check_alive()
            await self._draw_ahead(batch)
            await asyncio.wait((batch.rewarded,), timeout=_POLL_S)
        await self._draw_ahead(batch)
        return await batch.rewarded

    @property
    def _cards(self) -> Sequence[GroupCard]:
        return self._service.trajectories.cards(self._service.default_adapter)

    def unscored(self, batch: Batch) -> int:
        """Tasks of a batch whose answers could not be scored."""
        return sum(batch.first <= number < batch.end for number in self._unscored)

    @property
    def ready(self) -> list[int]:
        """The tasks of the current step whose groups an update can take, in order."""
        numbers = (self._rollouts.number_of(card.group_id) for card in self._cards if card.complete)
        return sorted(number for number in numbers if number is not None and self._first <= number < self._end_of_drawn)

    def end_step(self) -> range:
        """The tasks whose groups the update of the current step takes. The next step begins after them."""
        ready, end = self.ready, self._end_of_drawn
        if len(ready) > self._groups:  # what was drawn ahead has taken the place of groups without a signal
            end = ready[self._groups]
        tasks, self._first = range(self._first, end), end
        self._unscored = {number for number in self._unscored if number >= end}
        self._steps += 1
        return tasks

    @property
    def _end_of_drawn(self) -> int:
        """The number after the last task that is not drawn for the next step."""
        return self._rollouts.taken if self._ahead is None else self._ahead.first

    # -- batches ---------------------------------------------------------------------------------

    async def _draw_ahead(self, batch: Batch) -> None:
        """Begins to draw the next batch if this one has waited."""
        if self._draws_ahead and batch.waited:
            self._draws_ahead = False
            try:
                self._ahead = await self._begin(self._groups)
            except TrainingFailedError as error:  # it is raised when the next step needs the tasks
                self._failure = error

    async def _begin(self, groups: int) -> Batch:
        taken, version = await self._rollouts.take(groups), self._rollouts.live
        drawing = asyncio.create_task(self._rollouts.answer(taken, version))
        batch = Batch(taken.first, taken.end, version, drawing, time.monotonic())
        drawing.add_done_callback(lambda _: _stop_clock(batch))
        batch.rewarded = asyncio.create_task(self._follow(batch))
        return batch

    async def _follow(self, batch: Batch) -> RolloutResult:
        """Returns when all answers of a batch are drawn and have their rewards. Notes whether it has waited."""
        longest = math.inf if self._config.draw_ahead_after_s is None else self._config.draw_ahead_after_s
        while not batch.drawing.done() or self._waits_for_rewards(batch):
            batch.waited |= min(self._rollouts.quiet_s, time.monotonic() - batch.began) >= longest
            await asyncio.sleep(_POLL_S)
        return await batch.drawing

    def _waits_for_rewards(self, batch: Batch) -> bool:
        numbers = (self._rollouts.number_of(card.group_id) for card in self._cards if not card.complete)
        return any(number is not None and number < batch.end for number in numbers)

    def answered(self, number: int, count: int) -> None:
        """So many answers to a task have ended."""
        for batch in (self._current, self._ahead):
            if batch is not None and batch.first <= number < batch.end:
                batch.drawn += count
                if batch is self._current:
                    self._on_drawn(count)

    async def _end(self, *batches: Batch) -> None:
        tasks = [task for batch in batches for task in (batch.drawing, batch.rewarded)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_event(self, event: TrainingEvent) -> None:
        if event.kind == "dropped" and event.data["reasons"].get(DropReason.SCORING_FAILED.value):
            number = self._rollouts.number_of(event.data.get("group_id", ""))
            if number is not None:
                self._unscored.add(number)


def _stop_clock(batch: Batch) -> None:
    batch.seconds = time.monotonic() - batch.began


def figures_of(cards: Sequence[LevelCard]) -> Mapping[str, float]:
    """The figures of the levels by name, such as `curriculum/easy/success`."""
    return {
        f"{LEVEL_PREFIX}{card.level}/{name}": value
        for card in cards
        for name, value in (("success", card.success), ("share", card.share), ("drawn", float(card.drawn)))
    }


WARM_UP = "warm_up_updates"
"""Key of an update's progress: the updates of the warm-up so far."""

_UNSCORED = "a task's answers could not be scored"
_MIN_WINDOW = 4
"""A run stops when most of its last tasks failed. It looks at as many tasks as a step has, but at least this many."""


_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class EnvironmentRun(TrainingRun):
    """Each step draws groups of answers to some tasks of `source`, and waits for their rewards; see `StepRollouts`.
    Tasks that were answered for no update when the process ended are answered again.
    """

    source: Environment

    def __post_init__(self) -> None:
        window = max(self.options.prompts_per_step, _MIN_WINDOW)
        self.failures = deque[str](maxlen=window)  # "" for a task that succeeded
        options, config = self.options, self.config
        self.rollouts = EnvironmentRollouts(
            config,
            self.served,
            self.service,
            self.source,
            options.group_size,
            lambda number, count: self.step_rollouts.answered(number, count),
        )
        self.step_rollouts = StepRollouts(
            self.rollouts,
            self.service,
            config.rl_training,
            options.prompts_per_step,
            options.group_size,
            self._check_alive,
            self._report_rollout,
        )

    async def _open(self, done: int, taken: int) -> None:
        """Raises ConfigError: the engine cannot draw what training needs."""
        await self.rollouts.open(taken, self.service.loop().training.progress)
        self.step_rollouts.open(taken)
        if done < self.options.steps:
            await self.rollouts.open_inference(self.cluster.engine if self.cluster is not None else None)

    async def _warm_up(self) -> None:
        """Makes the updates of the warm-up that an earlier process has not made.

        Raises:
            ConfigError: the environment has no examples that can be trained on.
            TrainingFailedError: an update changed nothing.
        """
        if not self.options.warm_up:
            return
        seed, tokenizer = self.config.rl_training.seed, self.served.tokenizer
        batches = warm_up_batches(self.source, self.options.warm_up, seed, tokenizer)
        made = int(self.service.loop().training.progress.get(WARM_UP, 0))
        for number, batch in enumerate(batches[made:], made + 1):
            progress = {STEPS: 0, TASKS: 0, WARM_UP: number}
            report = await self.service.update(given=batch, signal=Signal.CORRECTIONS, progress=progress)
            if report.status != "published":
                raise TrainingFailedError(f"update {number} of the warm-up was {report.status}: {report.reason}")
            _log.info("update %d of %d of the warm-up is made", number, len(batches))

    async def _close(self) -> None:
        await self.step_rollouts.close()
        await self.rollouts.close()

    async def _fill(self, is_last: bool) -> Filled:
        tokens, drawing, failures = 0, 0.0, list[str]()
        self.step_rollouts.begin_step(is_last)
        for _ in range(1 + self._refills):
            missing = self.options.prompts_per_step - len(self.step_rollouts.ready)
            if missing > 0:
                batch = await self._next_batch(missing)
                drawn = await self.step_rollouts.finish(batch)
                failed = [*drawn.failures, *[self._why_unscored] * self.step_rollouts.unscored(batch)]
                self._count(batch.end - batch.first, failed)
                for fault in drawn.faults:
                    self.view.task_failed(fault)
                failures += failed
                tokens, drawing = tokens + drawn.tokens, drawing + batch.seconds
        tasks = self.step_rollouts.end_step()
        state = self.rollouts.settle(tasks.stop)
        speed = {"tokens_per_second": tokens / drawing if drawing else 0.0}
        return Filled(
            speed, tuple(failures), figures_of(self.rollouts.levels), partial(self._is_of, tasks), tasks.stop, state
        )

    async def _next_batch(self, groups: int) -> Batch:
        batch = await self.step_rollouts.next_batch(groups)
        self.wanted += (batch.end - batch.first) * self.options.group_size
        self._report_rollout(batch.drawn)
        return batch

    def _is_of(self, tasks: range, group_id: str) -> bool:
        return self.rollouts.number_of(group_id) in tasks

    def _count(self, tasks: int, failures: list[str]) -> None:
        """Reports the tasks that failed."""
        for failure in failures:
            self.view.task_failed(failure)
        self.failures.extend([""] * (tasks - len(failures)) + failures)

    def _check_run(self) -> None:
        failed = [failure for failure in self.failures if failure]
        if len(self.failures) == self.failures.maxlen and 2 * len(failed) > len(self.failures):
            raise TrainingFailedError(
                f"{len(failed)} of the last {len(self.failures)} tasks failed, the last of them with: {failed[-1]}; "
                "repair the environment and continue with --resume"
            )

    @property
    def _why_unscored(self) -> str:
        return f"{_UNSCORED}: {self.service.parts.scorers.last_fault or 'it took too long'}"

    @property
    def _refills(self) -> int:
        """How many times groups without a learning signal are replaced: dapo's dynamic sampling (arXiv 2503.14476)."""
        return REFILLS if self.config.rl_training.algorithm == "dapo" else 0
