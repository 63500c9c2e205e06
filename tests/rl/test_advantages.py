"""Rewards to advantages: what is compared with what, and which groups teach nothing."""

import numpy as np
import pytest

from mlx_parallm.config import RewardScale
from mlx_parallm.rl.collect.groups import DropReason
from mlx_parallm.rl.objectives.batches import group_advantages
from mlx_parallm.rl.objectives.rewards import FEEDBACK_BASELINE, RunningBaseline


def values(rewards, scale=RewardScale.GROUP):
    (group,) = group_advantages([rewards], scale)
    return group.values


def test_by_hand():
    # mean 1/2, population deviation 1/2: 0.5 / 0.5001
    assert values([0, 0, 1, 1]) == pytest.approx([-0.9998, -0.9998, 0.9998, 0.9998], abs=1e-7)
    assert values([0, 0, 1, 1], RewardScale.NONE) == (-0.5, -0.5, 0.5, 0.5)
    # all rewards 0, 1, 10, 14: mean 6.25, variance (39.0625 + 27.5625 + 14.0625 + 60.0625) / 4 = 35.1875
    low, high = group_advantages([[0, 1], [10, 14]], RewardScale.BATCH)
    assert low.values == pytest.approx((-0.5 / 5.9320, 0.5 / 5.9320), rel=1e-4)
    assert high.values == pytest.approx((-2 / 5.9320, 2 / 5.9320), rel=1e-4)


@pytest.mark.parametrize("scale", RewardScale)
def test_every_group_adds_up_to_zero_and_keeps_its_order(scale):
    rng = np.random.default_rng(0)
    groups = [rng.normal(rng.uniform(-100, 100), rng.uniform(0.01, 10), n).tolist() for n in (2, 3, 8, 31)]
    for rewards, group in zip(groups, group_advantages(groups, scale), strict=True):
        assert group.dropped is None
        assert sum(group.values) == pytest.approx(0, abs=1e-9)
        assert np.argsort(group.values).tolist() == np.argsort(rewards).tolist()


@pytest.mark.parametrize("scale", RewardScale)
@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.7], DropReason.SINGLE),
        ([], DropReason.SINGLE),
        ([0, 0, 0], DropReason.ZERO_VARIANCE),
        ([0.1 + 0.2, 0.3, 0.3], DropReason.ZERO_VARIANCE),
        ([1e6, 1e6 + 0.01], DropReason.ZERO_VARIANCE),
        ([-5.0, -5.0 - 1e-7], DropReason.ZERO_VARIANCE),
    ],
)
def test_groups_that_teach_nothing_are_reported_and_zero(scale, rewards, reason):
    good, bad = group_advantages([[0.0, 1.0], rewards], scale)
    assert bad.dropped is reason
    assert bad.values == (0.0,) * len(rewards)
    assert good.dropped is None
    assert np.isfinite(good.values).all()


def test_a_small_true_difference_is_kept_and_not_blown_up():
    # the deviation 0.0005 is below 0.02 of the largest reward, which divides instead
    least = 0.02 * 0.501
    (group,) = group_advantages([[0.5, 0.501]], RewardScale.GROUP)
    assert group.values == pytest.approx([-0.0005 / (least + 1e-4), 0.0005 / (least + 1e-4)])
    assert group.strength == pytest.approx(0.0005 / least)
    assert values([100.0, 101.0]) == pytest.approx([-0.5 / (2.02 + 1e-4), 0.5 / (2.02 + 1e-4)])


def test_a_group_that_is_all_but_solved_is_not_a_full_signal():
    solved, one_left = group_advantages([[1.0] * 7 + [0.999], [1.0] * 7 + [0.0]], RewardScale.GROUP)
    assert max(map(abs, solved.values)) < 0.05
    assert solved.strength < 0.02
    assert max(map(abs, one_left.values)) == pytest.approx(2.645, abs=1e-3)
    assert one_left.strength == 1.0


@pytest.mark.parametrize("scale", RewardScale)
def test_strength_does_not_depend_on_the_scale_or_the_units(scale):
    groups = [[1.0] * 7 + [0.99], [0.2, 0.8], [3.0, 3.0]]
    one, full, none = (group.strength for group in group_advantages(groups, scale))
    assert (0 < one < 1, full, none) == (True, 1.0, 0.0)
    scaled = group_advantages([[1000 * reward for reward in group] for group in groups], scale)
    assert [group.strength for group in scaled] == pytest.approx([one, full, none])


@pytest.mark.parametrize("dropped", [[9.0, 9.0], [9.0]])
def test_batch_scale_counts_the_rewards_of_dropped_groups(dropped):
    with_dropped = group_advantages([[0.0, 1.0], dropped], RewardScale.BATCH)[0]
    alone = group_advantages([[0.0, 1.0]], RewardScale.BATCH)[0]
    assert 0 < with_dropped.values[1] < alone.values[1]


def test_no_groups_at_all():
    assert group_advantages([], RewardScale.BATCH) == ()


def test_a_running_baseline_compares_with_what_came_before():
    baseline, seen = RunningBaseline.starting_at(1.0), []
    for reward in (0.0, 2.0, 2.0):
        seen.append(baseline.advantage(reward, scaled=False))
        baseline = baseline.including(reward)
    assert seen == [-1.0, 1.5, 1.0]
    assert (baseline.count, baseline.mean) == (4, 1.25)
    assert baseline.variance == pytest.approx(np.var([1.0, 0.0, 2.0, 2.0]))


def test_a_running_baseline_follows_the_rewards_and_not_their_whole_life():
    baseline = RunningBaseline.starting_at(0.0)
    for reward in [0.0] * 200 + [1.0] * 60:
        last, baseline = baseline.advantage(reward, scaled=True), baseline.including(reward)
    assert 0 < last < 0.25
    assert baseline.advantage(0.0, scaled=True) < -2


def test_scaled_advantages_are_bounded_whatever_came_before():
    baseline = FEEDBACK_BASELINE
    for _ in range(500):
        baseline = baseline.including(1.0)
    assert abs(baseline.advantage(0.999, scaled=True)) < 0.1  # all but equal rewards are not blown up
    assert -4.6 < baseline.advantage(-1e9, scaled=True) < -4.5


@pytest.mark.parametrize(("score", "sign"), [(1, 1), (0, -1), (-1, -1)])
def test_the_first_thumb_counts(score, sign):
    assert sign * FEEDBACK_BASELINE.advantage(score, scaled=True) > 0.5
