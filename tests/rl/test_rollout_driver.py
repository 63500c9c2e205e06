"""How many groups a server samples by itself while those of its next update wait. Rollouts and service are made up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from configs import TRAINING, changed

from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.rl.rollouts.answers import NoTaskYetError, RolloutResult
from mlx_parallm.rl.rollouts.driver import RolloutDriver

WANTED, SIZE = 4, 2


class World:
    """A server that is to sample groups, and what its next update needs. `sampling`: those that are being sampled,
    which `end` ends."""

    per_update = WANTED

    def __init__(self) -> None:
        self.taken, self.quiet_s = 0, 0.0
        self.has_enough = self.is_changing = False
        self.with_signal = self.groups_in_scoring = self.waiting = 0
        self.sampling: list[asyncio.Future[RolloutResult]] = []
        config = changed(TRAINING, draw_ahead_after_s=0.01)
        self.looks = 0
        self.driver = RolloutDriver(self, self, lambda: self.groups_in_scoring, config, SIZE, 16, self.holds_back)
        self.driver.start()

    def holds_back(self) -> bool:
        """Called whenever the driver looks whether more groups are wanted."""
        self.looks += 1
        return False

    async def sample(self, groups: int) -> RolloutResult:
        self.taken += groups
        self.sampling.append(asyncio.get_running_loop().create_future())
        return await self.sampling[-1]

    def end(self, groups: int) -> None:
        """So many groups are sampled, and wait for their rewards."""
        self.groups_in_scoring += groups
        self.waiting += groups * SIZE
        for sampled in self.sampling[:groups]:
            sampled.set_result(RolloutResult(1, ()))
        del self.sampling[:groups]

    def reward(self, groups: int) -> None:
        self.groups_in_scoring -= groups
        self.with_signal += groups * SIZE
        self.has_enough = self.with_signal >= WANTED

    def update(self) -> None:
        """An update takes its groups, and is being made."""
        self.with_signal -= WANTED
        self.waiting -= WANTED
        self.has_enough, self.is_changing = self.with_signal >= WANTED, True

    async def takes(self, tasks: int) -> None:
        """Exactly so many tasks are taken."""
        await until(lambda: self.taken >= tasks)
        seen = self.looks
        await until(lambda: self.looks > seen + 8)
        assert self.taken == tasks


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_parallm.rl.rollouts.driver._POLL_S", 0.01)
    one = World()
    yield one
    await one.driver.close()


async def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < 20
        await asyncio.sleep(0.01)


async def test_whatever_ends_the_rollouts_is_in_their_status(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.takes(2)
    del world.groups_in_scoring
    await until(lambda: world.driver.state == "failed")
    assert "groups_in_scoring" in world.driver.last_failure
    assert "Traceback" in caplog.text


async def test_a_task_that_comes_late_is_waited_for_again_and_the_end_of_the_tasks_ends_the_rollouts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.rl.rollouts.driver._FIRST_DELAY_S", 0.01)
    await world.takes(2)
    for sampled in world.sampling:
        sampled.set_exception(NoTaskYetError("the environment gave no task within 9 s"))
    world.sampling.clear()
    await until(lambda: world.taken > 2)
    assert (world.driver.state, world.driver.failed) == ("drawing", 2)
    assert world.driver.last_failure == "the environment gave no task within 9 s", "the status says why"
    world.end(1)
    await until(lambda: world.driver.sampled == 1)
    await until(lambda: bool(world.sampling))
    world.sampling[0].set_exception(TrainingFailedError("the environment has no more tasks"))
    await until(lambda: world.driver.state == "failed")
    assert world.driver.last_failure == "the environment has no more tasks"


async def test_while_rewards_are_awaited_the_groups_of_one_more_update_are_sampled(world: World) -> None:
    await world.takes(2)
    world.end(2)
    world.quiet_s = 1.0
    await world.takes(4)
    world.end(2)
    await world.takes(4)  # never those of a third update
    world.reward(2)
    await world.takes(4)
    world.update()
    await world.takes(4)  # the two that wait would be two versions old after the update that they are for
    world.is_changing = False
    await world.takes(6)
