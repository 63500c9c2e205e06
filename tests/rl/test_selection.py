"""Which trajectories an update waits for, how large its step is, and when falling rewards bring a version back."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from configs import changed
from rl.fakes import groups_of, trajectories
from rl.rig import NAME, SETTINGS, opened, ref, running, settle
from sample_parts import advantage

from mlx_parallm.config import RewardScale
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.rl.rewards import RewardTrend, RunningReward
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState

GROUPS = changed(SETTINGS, update_frequency=64, scale_rewards=RewardScale.GROUP, trajectory_buffer_size=64)
SOLVED = (1.0,) * 8
ONE_LEFT = (1.0,) * 7 + (0.0,)
ALL_BUT_SOLVED = (1.0,) * 7 + (0.999,)


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


async def test_a_group_that_is_all_but_solved_hardly_moves_the_policy() -> None:
    rig = await opened(settings=changed(GROUPS, update_frequency=8))
    async with running(rig):
        rig.drawn(*ONE_LEFT)
        await settle()
        rig.drawn(*ALL_BUT_SOLVED)
    first, batch = rig.learner.batches
    assert first.step_scale == 1.0
    assert batch.step_scale < 0.02, "earlier groups of this scorer say that such a difference is small"
    advantages = [max(abs(advantage(sample)) for sample in each.samples) for each in (first, batch)]
    assert advantages == pytest.approx([2.645, 2.031], abs=0.01), "weakness counts once: it makes the step smaller"


async def test_an_update_on_request_is_as_large_as_the_signal_in_what_was_asked_for() -> None:
    rig = await opened(settings=changed(GROUPS, update_frequency=16))
    rig.drawn(*SOLVED)
    rig.drawn(*ONE_LEFT)
    await rig.loop.update(None)
    given = [GivenTrajectory((at,), (2,), reward) for at in range(4) for reward in (1.0, float(at > 0))]
    await rig.loop.update(given)
    assert [batch.step_scale for batch in rig.learner.batches] == [1 / 2, 1 / 4]


async def test_a_step_with_refills_is_whole_again() -> None:
    rig = await opened(settings=changed(GROUPS, update_frequency=16))
    rig.loop.pause()
    for rewards in (SOLVED, ONE_LEFT, SOLVED, ONE_LEFT):
        rig.drawn(*rewards)
    await rig.loop.update(None)
    assert rig.learner.batches[0].step_scale == 1.0


async def test_the_rewards_of_a_group_that_waits_for_the_next_update_count_once() -> None:
    rig = await opened(settings=changed(GROUPS, update_frequency=8))
    rig.loop.pause()
    for _ in range(2):
        rig.drawn(*ONE_LEFT)
    async with running(rig):
        rig.loop.resume()
    assert len(rig.learner.batches) == 2
    assert rig.training.rewards.to_metrics()["reward_count.exact"] == 2


async def test_a_group_whose_update_was_cancelled_counts_once() -> None:
    """Its rewards are those of people, which count when an update takes them."""
    rig = await opened(settings=changed(GROUPS, update_frequency=64))
    group = TrajectoryGroup(NAME, trajectories("g", rig.training.versions.latest, 2, None))
    rig.buffer.add(group)
    for member, score in zip(group.members, (1.0, 0.0), strict=True):
        groups_of(rig.buffer).apply(Feedback(member.trajectory.trajectory_id, score))
    rig.learner.error = asyncio.CancelledError()
    for _ in range(3):
        with pytest.raises(asyncio.CancelledError):
            await rig.loop.update(None)
    rig.learner.error = None
    await rig.loop.update(None)
    assert len(rig.learner.batches) >= 1
    assert rig.training.rewards.to_metrics()["reward_count.feedback"] == 1


async def test_a_fall_among_groups_that_wait_is_noticed_before_they_are_learnt_from() -> None:
    rig = await opened(settings=GROUPS)
    async with running(rig):
        for _ in range(16):
            rig.drawn(*ONE_LEFT)
            await settle()
        assert rig.publisher.names[NAME] == ref(2)
        for _ in range(8):
            rig.drawn(*((0.0,) * 7 + (1.0,)))
            await settle()
    assert rig.kinds[-3:] == ["rollback", "checkpoint", "skipped"]
    assert len(rig.learner.batches) == 2


async def test_each_part_of_a_group_counts_when_people_score_it_in_parts() -> None:
    rig = await opened(settings=changed(GROUPS, update_frequency=1))
    group = TrajectoryGroup(NAME, trajectories("g", rig.training.versions.latest, 2, None))
    rig.buffer.add(group)
    for member, score in zip(group.members, (1.0, 0.0), strict=True):
        groups_of(rig.buffer).apply(Feedback(member.trajectory.trajectory_id, score))
        await rig.loop.update(None)
    assert rig.training.rewards.to_metrics()["reward_count.feedback"] == 2


# ---- falling rewards -----------------------------------------------------------------------------


@pytest.mark.parametrize("low", [0.0, 0.3])
async def test_a_collapse_brings_the_best_version_back_though_nothing_of_it_has_a_signal(low: float) -> None:
    rig = await opened(settings=GROUPS)
    async with running(rig):
        for _ in range(8):
            rig.drawn(*ONE_LEFT)
        await settle()
        for _ in range(8):
            rig.drawn(*ONE_LEFT)
        await settle()
        assert rig.publisher.names[NAME] == ref(2)
        drawn = 0
        while rig.publisher.names[NAME] == ref(2):
            rig.drawn(*(low,) * 8)
            await settle()
            drawn += 1
    assert drawn <= 8, "within the trajectories of one update"
    assert rig.kinds[-3:] == ["rollback", "checkpoint", "skipped"]
    assert "rolled_back" in rig.loop.status().skips
    rig.check()


@pytest.mark.parametrize("chance", [0.5, 0.9, 0.97])
def test_noise_at_a_level_is_hardly_ever_taken_for_a_fall(chance: float) -> None:
    """Groups of 8 rewards of 0 or 1, four in an update: less often than once in 200 updates."""
    random, trend, falls = np.random.default_rng(0), RewardTrend(), 0
    for _ in range(2000):
        for _ in range(4):
            trend.observe("exact", random.binomial(8, chance) / 8, current=True)
        trend.mark_best()
        if trend.fell_by(0.15):
            falls, trend = falls + 1, RewardTrend()
    assert falls < 10


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


def test_a_fall_of_several_scorers_at_once_is_seen() -> None:
    random, trend = np.random.default_rng(0), RewardTrend()
    for level, groups in ((0.8, 40), (0.3, 12)):
        assert not trend.fell_by(0.15)
        for _ in range(groups):
            for scorer in ("exact", "math", "length", "regex"):
                trend.observe(scorer, level + random.uniform(-0.1, 0.1), current=True)
        if level == 0.8:
            trend.mark_best()
    assert trend.fell_by(0.15)


def test_the_noise_of_the_first_groups_is_the_mean_of_all_of_them() -> None:
    rewards = [0.2, 0.4, 0.1, 0.3]
    running = RunningReward(1, rewards[0], rewards[0], 0.0)
    for reward in rewards[1:]:
        running = running.including(reward)
    assert running.mean == pytest.approx(np.mean(rewards))
    assert running.noise == pytest.approx(np.mean(np.diff(rewards) ** 2) / 2)
    assert running.squared_error == pytest.approx(running.noise / 4)


def test_the_squared_error_is_the_variance_of_the_running_mean() -> None:
    random, running = np.random.default_rng(0), RunningReward(1, 0.5, 0.5, 0.0)
    means, errors = [], []
    for reward in random.uniform(0, 1, 20_000):
        running = running.including(reward)
        means.append(running.mean)
        errors.append(running.squared_error)
    assert np.mean(errors[100:]) == pytest.approx(np.var(means[100:]), rel=0.15)


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


async def test_groups_that_wait_when_the_policy_is_opened_again_count_in_the_new_trend() -> None:
    rig = await opened(settings=GROUPS)
    async with running(rig):
        rig.drawn(*SOLVED)
        rig.drawn(*ONE_LEFT)
        await settle()
        assert rig.loop.status().detail["trajectories_without_signal"] == 8
        await rig.loop.open()
        assert not rig.training.rewards.trend.has_current
        rig.loop.wake()
        assert rig.training.rewards.trend.has_current
        detail = rig.loop.status().detail
        assert (detail["trajectories_with_signal"], detail["trajectories_without_signal"]) == (8, 0)


def test_one_absurd_reward_is_not_the_best_from_which_all_others_are_a_fall() -> None:
    falls = 0
    for seed in range(40):
        random, trend = np.random.default_rng(seed), RewardTrend()
        for number in range(200):
            trend.observe("exact", 1e4 if number == 100 else random.binomial(8, 0.5) / 8, current=True)
            if number % 4 == 3:
                trend.mark_best()
        falls += trend.fell_by(0.15)
        assert trend.best is not None
        assert trend.best < 1
    assert falls < 4


def test_a_jump_of_the_rewards_is_the_new_mean_within_some_groups() -> None:
    trend = RewardTrend()
    for reward in [0.3] * 200 + [0.25] + [0.3] * 200 + [0.9] * 24:
        trend.observe("exact", reward, current=True)
    assert trend.mean == pytest.approx(0.9, abs=0.1)
