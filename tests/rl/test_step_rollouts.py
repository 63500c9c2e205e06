"""What the steps of a run sample, and when. Answers and rewards are made up, and come when the test says so."""

from __future__ import annotations

import pytest
from rl.step_world import World, a_while, until

from mlx_parallm.core.adapters import AdapterRef


@pytest.fixture
async def world():
    """A run after its first step, in which nothing waited."""
    one = World()
    one.rollouts.quiet_s = 0.0
    _, ended = await one.begin()
    await one.sample(0, 1)
    one.reward(0, 1)
    await ended
    assert one.update() == range(2)
    one.rollouts.quiet_s = 100.0
    yield one
    await one.steps.close()


async def test_what_was_sampled_ahead_by_a_version_that_is_gone_is_dropped(world: World) -> None:
    _, ended = await world.begin()
    await world.sample(2, 3)
    await until(lambda: len(world.begun) == 3)
    await world.sample(4)
    world.reward(2, 3)
    await ended
    world.update()
    world.usable.remove(AdapterRef("a", 2))  # a rollback
    world.drop(4, "unknown_version")
    batch, ended = await world.begin()
    assert world.cancelled == [4]
    assert (batch.first, batch.version.version) == (6, 3)
    await world.sample(6, 7)
    world.reward(6, 7)
    await ended
    assert world.update() == range(4, 8), "tasks that were sampled ahead in vain are not taken again"


# ---- refills -------------------------------------------------------------------------------------


async def test_groups_without_a_signal_are_replaced_by_those_of_the_next_step(world: World) -> None:
    """The rest of them is taken by the next step, and nothing becomes two versions old."""
    _, ended = await world.begin()
    await world.sample(2, 3)
    await until(lambda: len(world.begun) == 3)
    await world.sample(4, 5)
    world.drop(2, "zero_variance")
    world.reward(3)
    await ended
    assert world.steps.ready == [3], "task 4 and 5 are of the next step so far"
    batch, ended = await world.go_on(1)
    assert (batch.first, batch.end) == (4, 6)
    await a_while()
    assert len(world.begun) == 3, "a step samples ahead once"
    world.reward(4, 5)
    await ended
    assert world.steps.ready == [3, 4, 5]
    assert world.update() == range(2, 5), "as many groups as a step has"
    world.steps.begin_step(False)
    assert world.steps.ready == [5]
    batch, ended = await world.go_on(1)
    assert (batch.first, batch.end, batch.version.version) == (6, 7, 3)
    await world.sample(6)
    world.reward(6)
    await ended
    assert world.update() == range(5, 7)
