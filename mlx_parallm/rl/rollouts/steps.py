"""StepRollouts: samples the groups of one step of a training run after the other. While one step waits, the rollouts of
the next one are sampled.

    step n     tasks 0-3 ── answers ──▶ rewards · · · wait · · · ▶ update n
    step n+1                                tasks 4-7 ── answers ──▶ rewards · ▶ update n+1

The version that answers the tasks of step n+1 is then one version old when they are trained on. It is never older: at
most one batch is sampled ahead, and a step begins no second one. A batch that was sampled ahead and has waited
meanwhile is followed by another one before its own update, because that one would have to wait as well.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_parallm.config import RLTrainingConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.trajectories import GroupCard
from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.rl.rollouts.answers import RolloutResult
from mlx_parallm.rl.rollouts.environment import EnvironmentRollouts
from mlx_parallm.rl.status import LEVEL_PREFIX, LevelCard, TrainingEvent
from mlx_parallm.rl.trajectories import DropReason

if TYPE_CHECKING:
    from mlx_parallm.rl.service import TrainingService

_POLL_S = 0.05
_ROOM = 3
"""The groups of two steps are in the buffer at most. It must have room for those of three, since steps differ."""

_FIRST_TURNS = 4
"""In the first step, whose size is not known yet, an episode is expected to have at most so many turns."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Batch:
    """Tasks that one version answers together: those numbered `first` to `end`, without `end`.

    Attributes:
        began: monotonic time when the first one was asked.
        sampled: answers or episodes that have ended.
        seconds: from `began` until all had ended.
        waited: whether nothing was sampled for `draw_ahead_after_s` seconds before it had all rewards.
        rewarded: done when all answers are sampled and have their rewards.
    """

    first: int
    end: int
    version: AdapterRef
    sampling: asyncio.Task[RolloutResult]
    began: float
    sampled: int = 0
    seconds: float = 0.0
    waited: bool = False
    rewarded: asyncio.Task[RolloutResult] = field(init=False)


class StepRollouts:
    """Samples the groups of one step after the other, and waits for their rewards. Event loop's thread only.

    Args:
        groups: those of one step.
        group_size: answers or episodes of a group.
        check_alive: called again and again while it waits; what it raises ends the wait.
        on_sampled: called with the number of answers or episodes of the current step that have just ended.
    """

    def __init__(
        self,
        rollouts: EnvironmentRollouts,
        service: TrainingService,
        config: RLTrainingConfig,
        groups: int,
        group_size: int,
        check_alive: Callable[[], None],
        on_sampled: Callable[[int], None],
    ) -> None:
        self._rollouts, self._service, self._config = rollouts, service, config
        self._groups, self._group_size = groups, group_size
        self._check_alive, self._on_sampled = check_alive, on_sampled
        self._first = 0  # of the current step's tasks
        self._current: Batch | None = None
        self._ahead: Batch | None = None
        self._failure: TrainingFailedError | None = None  # of the tasks that were to be sampled ahead
        self._samples_ahead = False  # in the current step, if it has to wait
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
        self._samples_ahead = not is_last and self._may_sample_ahead

    @property
    def _may_sample_ahead(self) -> bool:
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
                "what %s has sampled ahead is dropped: training does not continue from it any more", batch.version
            )
            await self._end(batch)
            batch = None
        if batch is None and self._failure is not None:
            raise self._failure
        self._current = batch or await self._begin(groups)
        return self._current

    async def finish(self, batch: Batch) -> RolloutResult:
        """Returns when all answers of the current batch are sampled and have their rewards.

        Raises:
            EngineDeadError: the device thread has stopped.
        """
        while not batch.rewarded.done():
            self._check_alive()
            await self._sample_ahead(batch)
            await asyncio.wait((batch.rewarded,), timeout=_POLL_S)
        await self._sample_ahead(batch)
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
        return sorted(
            number for number in numbers if number is not None and self._first <= number < self._end_of_sampled
        )

    def end_step(self) -> range:
        """The tasks whose groups the update of the current step takes. The next step begins after them."""
        ready, end = self.ready, self._end_of_sampled
        if len(ready) > self._groups:  # what was sampled ahead has taken the place of groups without a signal
            end = ready[self._groups]
        tasks, self._first = range(self._first, end), end
        self._unscored = {number for number in self._unscored if number >= end}
        self._steps += 1
        return tasks

    @property
    def _end_of_sampled(self) -> int:
        """The number after the last task that is not sampled for the next step."""
        return self._rollouts.taken if self._ahead is None else self._ahead.first

    # -- batches ---------------------------------------------------------------------------------

    async def _sample_ahead(self, batch: Batch) -> None:
        """Begins to sample the next batch if this one has waited."""
        if self._samples_ahead and batch.waited:
            self._samples_ahead = False
            try:
                self._ahead = await self._begin(self._groups)
            except TrainingFailedError as error:  # it is raised when the next step needs the tasks
                self._failure = error

    async def _begin(self, groups: int) -> Batch:
        taken, version = await self._rollouts.take(groups), self._rollouts.live
        sampling = asyncio.create_task(self._rollouts.answer(taken, version))
        batch = Batch(taken.first, taken.end, version, sampling, time.monotonic())
        sampling.add_done_callback(lambda _: _stop_clock(batch))
        batch.rewarded = asyncio.create_task(self._follow(batch))
        return batch

    async def _follow(self, batch: Batch) -> RolloutResult:
        """Returns when all answers of a batch are sampled and have their rewards. Notes whether it has waited."""
        longest = math.inf if self._config.draw_ahead_after_s is None else self._config.draw_ahead_after_s
        while not batch.sampling.done() or self._waits_for_rewards(batch):
            batch.waited |= min(self._rollouts.quiet_s, time.monotonic() - batch.began) >= longest
            await asyncio.sleep(_POLL_S)
        return await batch.sampling

    def _waits_for_rewards(self, batch: Batch) -> bool:
        numbers = (self._rollouts.number_of(card.group_id) for card in self._cards if not card.complete)
        return any(number is not None and number < batch.end for number in numbers)

    def answered(self, number: int, count: int) -> None:
        """So many answers to a task have ended."""
        for batch in (self._current, self._ahead):
            if batch is not None and batch.first <= number < batch.end:
                batch.sampled += count
                if batch is self._current:
                    self._on_sampled(count)

    async def _end(self, *batches: Batch) -> None:
        tasks = [task for batch in batches for task in (batch.sampling, batch.rewarded)]
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
