"""Which trajectories an update waits for, how large its step is, and when falling rewards bring a version back."""

from __future__ import annotations

import numpy as np
import pytest
from configs import changed
from rl.rig import NAME, SETTINGS, opened, running, settle

from mlx_parallm.config import RewardScale
from mlx_parallm.rl.rewards import RewardTrend
from mlx_parallm.rl.trajectories import DropReason, TrajectoryState

GROUPS = changed(SETTINGS, update_frequency=64, scale_rewards=RewardScale.GROUP, trajectory_buffer_size=64)
SOLVED = (1.0,) * 8
ONE_LEFT = (1.0,) * 7 + (0.0,)


async def test_solved_groups_do_not_count_and_leave_no_trace_in_the_buffer() -> None:
    rig = await opened(settings=GROUPS)
    async with running(rig):
        solved = [rig.drawn(*SOLVED) for _ in range(7)]
        assert {(m.state, m.reason) for group in solved for m in group.members} == {
            (TrajectoryState.DROPPED, DropReason.ZERO_VARIANCE)
        }
        assert rig.buffer.waiting(NAME) == 0
        waiting = rig.drawn(*ONE_LEFT)
        await settle()
        assert rig.learner.batches == [], "64 trajectories, and 8 of them have a signal"
        status = rig.loop.status()
        assert (status.detail["trajectories_with_signal"], status.detail["trajectories_without_signal"]) == (8, 56)
        for _ in range(7):
            rig.drawn(*ONE_LEFT)
    (batch,) = rig.learner.batches
    assert (len(batch.samples), batch.step_scale) == (64, 1.0)
    assert batch.metrics["reward_mean"] == pytest.approx(1 - 8 / 120), "with the rewards of those without a signal"
    assert batch.metrics["groups"] == 15
    assert waiting.members[0].state is TrajectoryState.TRAINED
    rig.check()


async def test_an_update_waits_for_three_refills_and_is_then_as_large_as_its_signal() -> None:
    rig = await opened(settings=GROUPS)
    async with running(rig):
        rig.drawn(*ONE_LEFT)
        for _ in range(30):
            rig.drawn(*SOLVED)
        await settle()
        assert rig.learner.batches == []
        rig.drawn(*SOLVED)
    (batch,) = rig.learner.batches
    assert (len(batch.samples), batch.step_scale) == (8, 1 / 8)
    rig.check()


async def test_an_update_may_take_some_groups_and_the_others_count_for_the_next_one() -> None:
    rig = await opened(settings=GROUPS)
    first, solved, second = rig.drawn(*ONE_LEFT), rig.drawn(*SOLVED), rig.drawn(*ONE_LEFT)
    report = await rig.loop.update(None, chosen={first.group_id, "of nobody"}.__contains__)
    assert (report.metrics["groups"], report.metrics["reward_mean"]) == (1, 7 / 8)
    assert {member.state for member in second.members} == {TrajectoryState.SCORED}
    rig.check()
    report = await rig.loop.update(None, chosen={solved.group_id, second.group_id}.__contains__)
    assert (report.metrics["groups"], report.metrics["reward_mean"]) == (2, 15 / 16)
    assert rig.buffer.waiting(NAME) == 0
    rig.check()


async def test_a_step_without_any_signal_ends_and_is_counted_and_told() -> None:
    rig = await opened(settings=GROUPS)
    async with running(rig):
        for _ in range(32):
            rig.drawn(*SOLVED)
    assert rig.learner.batches == []
    assert rig.loop.status().skips == {"no_signal": 1}
    assert rig.kinds == ["skipped"]
    assert rig.events[-1][1]["reason"] == "no_signal"
    assert rig.events[-1][1]["metrics"]["reward_mean"] == 1.0
    async with running(rig):
        for _ in range(31):
            rig.drawn(*SOLVED)
    assert rig.loop.status().skips == {"no_signal": 1}, "the next step has begun anew"


# ---- falling rewards -----------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [0.5, 0.9, 0.97, None])
def test_noise_at_a_level_is_not_taken_for_a_fall(chance: float | None) -> None:
    """Groups of 8 rewards of 0 or 1, four in an update, of equal tasks or of tasks of every difficulty."""
    random, trend = np.random.default_rng(0), RewardTrend()
    for _ in range(5000):
        for _ in range(4):
            trend.observe("exact", random.binomial(8, random.random() if chance is None else chance) / 8, current=True)
        trend.mark_best()
        assert not trend.fell_by(0.15)


@pytest.mark.parametrize(("low", "updates"), [(0.3, 1), (0.7, 3)])
def test_a_fall_is_seen_within_three_updates(low: float, updates: int) -> None:
    random, trend = np.random.default_rng(0), RewardTrend()
    for chance in [at / 6 for at in range(6)] + [1.0] * 24:  # a task solved in six updates
        for _ in range(4):
            trend.observe("exact", random.binomial(8, chance) / 8, current=True)
        trend.mark_best()
        assert not trend.fell_by(0.15)
    for _ in range(4 * updates):
        trend.observe("exact", random.binomial(8, low) / 8, current=True)
    assert trend.fell_by(0.15)


async def test_a_harder_task_is_no_fall() -> None:
    rig = await opened(settings=GROUPS)
    async with running(rig):
        for _ in range(16):
            rig.drawn(*ONE_LEFT, scorer="exact")
            await settle()
        for _ in range(40):
            rig.drawn(*((0.0,) * 7 + (1.0,)), scorer="math")
            await settle(20)
        assert "rollback" not in rig.kinds
        for _ in range(24):
            rig.drawn(*((0.0,) * 8), scorer="exact")
            await settle(20)
    assert "rollback" in rig.kinds, "of the task that was solved"
