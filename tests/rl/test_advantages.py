"""Rewards to advantages: what is compared with what, and which groups teach nothing."""

import numpy as np
import pytest
from configs import loss_config
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.config import RewardScale
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.rl.objectives import ScoredGroup, no_signal, prepare
from mlx_parallm.rl.rewards import FEEDBACK_BASELINE, RewardHistory, RunningBaseline
from mlx_parallm.rl.trajectories import FEEDBACK, DropReason, Episode
from mlx_parallm.train.advantages import GroupAdvantages, group_advantages, reward_range

ONE, OTHER = (Episode((GivenTrajectory((1,), (2, token)),)) for token in (3, 4))


def advantages_of(groups, scale, ranges=None) -> tuple[GroupAdvantages | None, ...]:
    """`ranges`: those of these groups, unless given."""
    ranges = ranges or [max(map(reward_range, groups), default=0.0)] * len(groups)
    return group_advantages(groups, scale, ranges, [0.0] * len(groups))


def values(rewards, scale=RewardScale.GROUP):
    (group,) = advantages_of([rewards], scale)
    return group.values


def test_by_hand():
    # mean 1/2, population deviation 1/2: 0.5 / 0.5001
    assert values([0, 0, 1, 1]) == pytest.approx([-0.9998, -0.9998, 0.9998, 0.9998], abs=1e-7)
    assert values([0, 0, 1, 1], RewardScale.NONE) == (-0.5, -0.5, 0.5, 0.5)
    # all rewards 0, 1, 10, 14: mean 6.25, variance (39.0625 + 27.5625 + 14.0625 + 60.0625) / 4 = 35.1875
    low, high = advantages_of([[0, 1], [10, 14]], RewardScale.BATCH)
    assert low.values == pytest.approx((-0.5 / 5.9320, 0.5 / 5.9320), rel=1e-4)
    assert high.values == pytest.approx((-2 / 5.9320, 2 / 5.9320), rel=1e-4)


@pytest.mark.parametrize("scale", RewardScale)
@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.7], DropReason.SINGLE),
        ([], DropReason.SINGLE),
        ([0, 0, 0], DropReason.ZERO_VARIANCE),
        ([0.1 + 0.2, 0.3, 0.3], DropReason.ZERO_VARIANCE),
        ([1e6 + 0.1 + 0.2, 1e6 + 0.3], DropReason.ZERO_VARIANCE),
        ([-5.0, -5.0 - 1e-14], DropReason.ZERO_VARIANCE),
    ],
)
def test_groups_that_teach_nothing_are_reported_and_zero(scale, rewards, reason):
    good, bad = advantages_of([[0.0, 1.0], rewards], scale)
    assert bad is None
    assert no_signal(rewards) is reason
    assert good is not None
    assert np.isfinite(good.values).all()


@pytest.mark.parametrize("scale", RewardScale)
@given(
    rewards=st.lists(st.lists(st.integers(-64, 64), min_size=1, max_size=6), min_size=1, max_size=4),
    offset=st.integers(-(2**24), 2**24),
)
def test_a_number_that_is_added_to_all_rewards_changes_nothing(scale, rewards, offset):
    """Rewards in 64ths and offsets are exact in float64. A constant of the whole scorer is no news in any group."""
    plain = advantages_of([[each / 64 for each in group] for group in rewards], scale)
    shifted = advantages_of([[each / 64 + offset for each in group] for group in rewards], scale)
    for one, other in zip(plain, shifted, strict=True):
        assert (other is None) == (one is None)
        if one is None:
            continue
        assert other.values == pytest.approx(one.values, rel=1e-6, abs=1e-6)
        assert other.strength == pytest.approx(one.strength, rel=1e-6)


def test_a_weak_group_counts_less_than_a_strong_one_or_makes_the_step_smaller_but_not_both():
    weak, strong = [0.5, 0.501], [0.0, 1.0]
    strength = 0.0005 / 0.02
    (alone,) = advantages_of([weak], RewardScale.GROUP, ranges=[1.0])
    assert (max(alone.values), alone.strength) == pytest.approx((0.0005 / 0.0006, strength))
    beside, full = advantages_of([weak, strong], RewardScale.GROUP, ranges=[1.0, 1.0])
    assert max(beside.values) == pytest.approx(0.0005 / (0.02 + 1e-4))
    assert (beside.strength, full.strength, max(full.values)) == pytest.approx((strength, 1.0, 0.5 / 0.5001))
    assert values([100.0, 101.0]) == pytest.approx([-0.5 / 0.5001, 0.5 / 0.5001])


def test_what_is_a_small_difference_is_known_from_earlier_groups_of_the_scorer_and_after_a_restart():
    history = RewardHistory()
    assert history.ranges([("a", 2.0), ("b", 0.0)]) == [2.0, 0.0]
    assert history.ranges([("a", 0.1), ("b", 0.1)]) == [2.0 * 0.99, 0.1]
    assert history.ranges([("a", 0.0)]) == [2.0 * 0.99], "groups without a signal change nothing"
    restored = RewardHistory()
    restored.restore_baselines(history.baselines())
    draft = restored.draft()
    assert draft.ranges([("a", 0.1)]) == history.ranges([("a", 0.1)])
    assert restored.ranges([("a", 0.0)]) == [2.0 * 0.99], "a draft that comes to nothing leaves no trace"


@pytest.mark.parametrize("absurd", [1e4, 1e100])
@pytest.mark.parametrize("before", [0, 1, 5, 50])
@pytest.mark.parametrize("together", [False, True])
def test_rewards_that_are_far_too_large_do_not_make_the_others_weak(absurd, before, together):
    """Not even if a fifth of the groups has them. They are groups of two answers, with feedback of 0 and 1. `together`:
    an absurd reward is in one update with usual ones. If the very first update has nothing else, two more are weak."""

    def strengths(*highs):
        groups = [ScoredGroup((ONE, OTHER), (0.0, high), FEEDBACK) for high in highs]
        return [each.strength for each in prepare(groups, loss_config(), history).advantages]

    history = RewardHistory()
    for _ in range(before):
        strengths(1.0)
    updates = [(absurd, 1.0, 1.0, 1.0, 1.0)] if together else [(absurd,), *[(1.0,)] * 4]
    found = [each for _ in range(100) for update in updates for each in strengths(*update)]
    first = 3 if not before and not together else 0
    assert found[first:] == [1.0] * (500 - first)


def test_a_running_baseline_compares_with_what_came_before():
    baseline, seen = RunningBaseline.starting_at(1.0), []
    for reward in (0.0, 2.0, 2.0):
        seen.append(baseline.advantage(reward, scaled=False))
        baseline = baseline.including(reward)
    assert seen == [-1.0, 1.5, 1.0]
    assert (baseline.count, baseline.mean) == (4, 1.25)
    assert baseline.variance == pytest.approx(np.var([1.0, 0.0, 2.0, 2.0]))


def test_scaled_advantages_are_bounded_whatever_came_before():
    baseline = FEEDBACK_BASELINE
    for _ in range(500):
        baseline = baseline.including(1.0)
    assert abs(baseline.advantage(0.999, scaled=True)) < 0.1  # all but equal rewards are not blown up
    assert -4.6 < baseline.advantage(-1e9, scaled=True) < -2
