"""What the steps of a run sample, and when. Answers and rewards are made up, and come when the test says so."""

from __future__ import annotations

import pytest
from rl.step_world import GROUPS, SIZE, World, a_while, until

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import EngineDeadError, TrainingFailedError


@pytest.fixture
async def world(request: pytest.FixtureRequest):
    """A run after its first step, in which nothing waited. A parameter has settings."""
    one = World(**getattr(request, "param", {}))
    one.rollouts.quiet_s = 0.0
    assert await one.whole_step() == range(2)
    one.rollouts.quiet_s = 100.0
    yield one
    await one.steps.close()


# ---- when ----------------------------------------------------------------------------------------


async def test_the_next_step_is_sampled_while_rewards_are_awaited_and_the_one_after_it_is_not(world: World) -> None:
    batch, ended = await world.begin()
    await world.sample(2, 3)
    await until(lambda: len(world.begun) == 3)
    assert world.begun[1:] == [(2, 2), (4, 2)], "both by the live version"
    await world.sample(4, 5)
    await a_while()
    assert len(world.begun) == 3, "never two steps ahead"
    world.reward(2, 3, 4)
    await ended
    assert (batch.first, world.update()) == (2, range(2, 4))
    batch, ended = await world.begin()
    assert (batch.first, batch.version.version, batch.sampled) == (4, 2, 2 * SIZE)
    await until(lambda: len(world.begun) == 4)  # task 5 still waits for its reward
    assert world.begun[3] == (6, 3), "by the version that the update has made"
    world.reward(5)
    await ended
    assert world.update() == range(4, 6)


async def test_a_batch_that_was_sampled_ahead_and_has_waited_is_followed_by_another_one(world: World) -> None:
    """Otherwise every second step would have to wait for its rewards."""
    _, ended = await world.begin()
    await world.sample(2, 3)
    await until(lambda: len(world.begun) == 3)
    await world.sample(4, 5)
    world.reward(2, 3)
    await ended
    assert world.update() == range(2, 4)
    await a_while()  # of the update
    world.reward(4, 5)
    for first in (4, 6):
        batch, ended = await world.begin()
        assert batch.first == first
        await ended
        await until(lambda following=first + 2: world.begun[-1][0] == following)
        assert world.begun[-1][1] == world.rollouts.live.version, "before the update, so that it is one version old"
        await world.sample(first + 2, first + 3)
        world.update()
        await a_while()
        world.reward(first + 2, first + 3)
    world.rollouts.quiet_s = 0.0
    assert (await world.begin())[0].first == 8


async def test_it_is_not_if_its_rewards_came_at_once() -> None:
    world = World(draw_ahead_after_s=0.5)
    await world.whole_step()
    _, ended = await world.begin()
    await world.sample(2, 3)
    await until(lambda: len(world.begun) == 3)
    world.rollouts.quiet_s = 0.0
    world.reward(2, 3)
    await ended
    world.update()
    _, ended = await world.begin()
    await world.sample(4, 5)
    world.reward(4, 5)
    await ended
    world.update()
    assert [first for first, _ in world.begun] == [0, 2, 4]
    await world.steps.close()


async def test_nothing_is_sampled_ahead_if_nothing_waits(world: World) -> None:
    for first in (2, 4, 6):
        world.rollouts.quiet_s = 0.0
        _, ended = await world.begin()
        await world.sample(first, first + 1)
        world.reward(first, first + 1)
        world.rollouts.quiet_s = 100.0
        await ended
        assert world.update() == range(first, first + 2)
    assert world.begun == [(0, 1), (2, 2), (4, 3), (6, 4)]


async def test_it_is_sampled_while_rollouts_wait_for_their_tools(world: World) -> None:
    _, ended = await world.begin()
    await until(lambda: len(world.begun) == 3)
    await world.sample(4, 5)
    world.reward(4, 5)
    await world.sample(2, 3)
    world.reward(2, 3)
    await ended
    assert world.update() == range(2, 4), "those of the next step wait, although they came first"
    batch, ended = await world.begin()
    await ended
    assert (batch.first, world.update()) == (4, range(4, 6))


async def test_it_is_not_while_the_engine_samples_or_has_just_sampled() -> None:
    world = World(draw_ahead_after_s=0.5)
    await world.whole_step()
    for quiet in (0.0, 0.3):
        world.rollouts.quiet_s = quiet
        _, ended = await world.begin()
        await a_while()
        await world.sample(world.rollouts.taken - 2, world.rollouts.taken - 1)
        await a_while()
        world.reward(*world.rewarded)
        await ended
        world.update()
    assert [first for first, _ in world.begun] == [0, 2, 4]
    world.rollouts.quiet_s = 100.0
    _, ended = await world.begin()
    await a_while()
    assert [first for first, _ in world.begun] == [0, 2, 4, 6], "its own answers have just begun"
    await until(lambda: len(world.begun) == 5)
    await world.steps.close()
    ended.cancel()


@pytest.mark.parametrize(
    "world",
    [{"draw_ahead_after_s": None}, {"max_staleness": 0}, {"trajectory_buffer_size": 3 * GROUPS * SIZE - 1}],
    indirect=True,
)
async def test_some_settings_take_turns(world: World) -> None:
    await takes_turns(world, is_last=False)


@pytest.mark.parametrize("world", [{"trajectory_buffer_size": 3 * GROUPS * SIZE}], indirect=True)
async def test_the_last_step_is_followed_by_none(world: World) -> None:
    await takes_turns(world, is_last=True)


async def test_the_first_step_samples_ahead_if_the_buffer_has_room_for_episodes_of_some_turns() -> None:
    await takes_turns(World(trajectory_buffer_size=3 * GROUPS * SIZE * 4 - 1), is_last=False)
    world = World(trajectory_buffer_size=3 * GROUPS * SIZE * 4)
    _, ended = await world.begin()
    await world.sample(0)
    await until(lambda: world.begun == [(0, 1), (2, 1)])
    await world.sample(1)
    world.reward(0, 1)
    await ended
    assert world.update() == range(2)
    await world.steps.close()


async def takes_turns(world: World, is_last: bool) -> None:
    before = world.begun[:]
    batch, ended = await world.begin(is_last)
    await world.sample(batch.first, batch.first + 1)
    await a_while()
    assert len(world.begun) == len(before) + 1
    world.reward(*world.rewarded)
    await ended


# ---- what goes wrong -----------------------------------------------------------------------------


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


async def test_an_environment_without_more_tasks_ends_the_step_that_needs_them(world: World) -> None:
    world.rollouts.left = 2
    _, ended = await world.begin()
    await world.sample(2, 3)
    await a_while()
    world.reward(2, 3)
    await ended
    assert world.update() == range(2, 4)
    with pytest.raises(TrainingFailedError, match="no more tasks"):
        await world.begin()


async def test_tasks_that_cannot_be_scored_count_in_their_own_step(world: World) -> None:
    batch, ended = await world.begin()
    await world.sample(2, 3)
    await until(lambda: len(world.begun) == 3)
    await world.sample(4, 5)
    world.drop(4, "scoring_failed")
    world.drop(3, "scoring_failed")
    world.drop(5, "zero_variance")
    world.reward(2)
    await ended
    assert world.steps.unscored(batch) == 1
    world.update()
    batch, ended = await world.begin()
    await ended
    assert world.steps.unscored(batch) == 1


async def test_the_end_of_the_device_thread_ends_the_wait(world: World) -> None:
    _, ended = await world.begin()
    await world.sample(2, 3)
    await until(lambda: len(world.begun) == 3)
    world.alive = False
    with pytest.raises(EngineDeadError):
        await ended


async def test_what_is_being_sampled_ends_with_the_run(world: World) -> None:
    _, ended = await world.begin()
    await until(lambda: len(world.begun) == 3)
    ended.cancel()
    await world.steps.close()
    assert world.cancelled == [2, 4]


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


# ---- reports -------------------------------------------------------------------------------------


async def test_answers_are_reported_in_the_step_that_they_are_for(world: World) -> None:
    world.told.clear()
    _, ended = await world.begin()
    await until(lambda: len(world.begun) == 3)
    await world.sample(4)
    assert world.told == []
    await world.sample(2, 3)
    assert world.told == [SIZE, SIZE]
    world.reward(2, 3)
    await ended
    world.update()
    batch, _ = await world.begin()
    assert batch.sampled == SIZE
    await world.sample(5)
    assert world.told == [SIZE] * 3
