"""A training run whose answers and rewards are made up, for tests of `StepRollouts`: the test says when they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

from configs import TRAINING, changed

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.trajectories import GroupCard
from mlx_parallm.rl.rollouts.answers import RolloutResult, TakenTasks
from mlx_parallm.rl.rollouts.steps import Batch, StepRollouts
from mlx_parallm.rl.status import TrainingEvent
from mlx_parallm.rl.trajectories import DropReason

GROUPS, SIZE = 2, 4


class Rollouts:
    """Each task is answered when `sample` is called for it. Until then its rollouts wait for a tool."""

    def __init__(self, world: World) -> None:
        self.taken, self.live, self.quiet_s = 0, AdapterRef("a", 1), 100.0
        self._world, self._may_end = world, dict[int, asyncio.Event]()

    def number_of(self, group_id: str) -> int | None:
        return int(group_id.removeprefix("task ")) if group_id.startswith("task ") else None

    async def take(self, groups: int) -> TakenTasks:
        first, self.taken = self.taken, self.taken + groups
        self._may_end |= {number: asyncio.Event() for number in range(first, self.taken)}
        return TakenTasks(first, (RuntimeError(),) * groups)

    async def answer(self, taken: TakenTasks, version: AdapterRef) -> RolloutResult:
        world, numbers = self._world, range(taken.first, taken.end)
        world.begun.append((taken.first, version.version))
        try:
            for number in numbers:
                await self._may_end[number].wait()
                world.steps.answered(number, SIZE)
                world.rewarded[number] = False
        except asyncio.CancelledError:
            world.cancelled.append(taken.first)
            raise
        return RolloutResult(len(numbers), ())

    def sample(self, *numbers: int) -> None:
        for number in numbers:
            self._may_end[number].set()


class World:
    """A run and, for it, the training service.

    `begun`: the first task of each batch, and the version that answers it. `cancelled`: the first tasks of batches.
    `rewarded`: the tasks whose groups are in the buffer, and whether they have their rewards."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.rewarded: dict[int, bool] = {}
        self.usable = {AdapterRef("a", 1)}
        self.emit: Callable[[TrainingEvent], None] = lambda _: None
        self.rollouts = Rollouts(self)
        config = changed(TRAINING, draw_ahead_after_s=0.01)
        self.steps = StepRollouts(self.rollouts, self, config, GROUPS, SIZE, lambda: None, lambda ended: None)
        self.steps.open(0)

    def add_sink(self, sink: Callable[[TrainingEvent], None]) -> None:
        self.emit = sink

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(trajectories_collected=GROUPS * SIZE)

    default_adapter = "a"

    @property
    def trajectories(self) -> World:
        return self

    def cards(self, adapter: str) -> list[GroupCard]:
        cards = [GroupCard(f"task {n}", "a", SIZE, SIZE * ok, ok) for n, ok in self.rewarded.items()]
        return [GroupCard("of a client", "a", 1, 0, False), *cards]

    def loop(self) -> SimpleNamespace:
        return SimpleNamespace(
            reason_against=lambda version: None if version in self.usable else DropReason.UNKNOWN_VERSION
        )

    # -- what the test does --------------------------------------------------------------------------

    async def begin(self) -> tuple[Batch, asyncio.Task[RolloutResult]]:
        """Begins a step. The task ends when all its answers have their rewards."""
        self.steps.begin_step(False)
        return await self.go_on(GROUPS)

    async def go_on(self, groups: int) -> tuple[Batch, asyncio.Task[RolloutResult]]:
        batch = await self.steps.next_batch(groups)
        return batch, asyncio.create_task(self.steps.finish(batch))

    async def sample(self, *numbers: int) -> None:
        """All answers to these tasks end."""
        self.rollouts.sample(*numbers)
        await until(lambda: all(number in self.rewarded for number in numbers))

    def reward(self, *numbers: int) -> None:
        self.rewarded |= dict.fromkeys(numbers, True)

    def drop(self, number: int, reason: str) -> None:
        """The group of a task is dropped."""
        del self.rewarded[number]
        self.emit(TrainingEvent("dropped", 0.0, {"group_id": f"task {number}", "reasons": {reason: SIZE}}))

    def update(self) -> range:
        """Makes the update of a step, which publishes a version."""
        tasks = self.steps.end_step()
        self.rewarded = {number: ok for number, ok in self.rewarded.items() if number not in tasks}
        self.rollouts.live = AdapterRef("a", self.rollouts.live.version + 1)
        self.usable.add(self.rollouts.live)
        return tasks


async def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < 20
        await asyncio.sleep(0.002)


async def a_while() -> None:
    await asyncio.sleep(0.2)
