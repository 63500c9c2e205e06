"""From rewards to advantages: how much better than expected each trajectory was. Pure Python and NumPy.

Standard deviations are the population's (divided by n): rewards 0, 0, 1, 1 give advantages ±0.9998.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.rl.settings import RewardScale

_EPSILON = 1e-4
"""Added to the standard deviation."""

_RUNNING_EPSILON = 0.01
"""The same for running baselines. Larger, since their spread may shrink to nothing over many equal rewards."""

_NEWEST = 0.05
"""Least weight of the newest reward in a running baseline."""

_LEAST_DEVIATION = 0.02
"""Of the largest reward's magnitude: a group whose rewards deviate less from their mean has a weaker signal."""

_LEAST_SPREAD = 1e-6
"""Of the largest reward's magnitude: rewards that differ by less are equal but for rounding."""

_Rewards = NDArray[np.float64]


class Unusable(StrEnum):
    """Why a group teaches nothing."""

    SINGLE_MEMBER = "single_member"
    ZERO_VARIANCE = "zero_variance"
    NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """`values`: one for each reward, in order; all 0 where the group is dropped. `dropped` None: train on it.

    `strength`: of its signal, from 0 where it is dropped to 1: an update of weak groups makes a smaller step.
    """

    values: tuple[float, ...]
    dropped: Unusable | None = None
    strength: float = 1.0

    @classmethod
    def none(cls, size: int, reason: Unusable) -> GroupAdvantages:
        return cls((0.0,) * size, reason, 0.0)


def group_advantages(groups: Sequence[Sequence[float]], scale: RewardScale) -> tuple[GroupAdvantages, ...]:
    """Rewards less their group's mean, scaled; the groups of one update together, in order.

    GROUP divides by the group's standard deviation + 1e-4, but by no less than 0.02 of its largest reward's magnitude:
    seven rewards of 1 and one of 0.999 are not made as far apart as seven of 1 and one of 0. A group's strength is its
    deviation over that bound, 1 at most, however it is scaled. BATCH divides by the standard deviation of all rewards
    + 1e-4, not centred and with those of dropped groups (arXiv 2508.08221), but for groups that are not finite; NONE
    by 1.
    """
    rewards = [np.asarray(group, np.float64) for group in groups]
    reasons = [_unusable(group) for group in rewards]
    divisor = _batch_deviation(rewards) if scale is RewardScale.BATCH else 1.0
    return tuple(
        GroupAdvantages.none(group.size, reason) if reason else _centred(group, scale, divisor)
        for group, reason in zip(rewards, reasons, strict=True)
    )


@dataclass(frozen=True, slots=True)
class RunningBaseline:
    """What one scorer's rewards were lately: what a sample without a group is compared with.

    Exponentially weighted mean and variance (T. Finch, "Incremental calculation of weighted mean and variance",
    2009). The first rewards weigh as in a plain mean; each later one 0.05, so the mean follows about the last 20.
    """

    count: int
    mean: float
    variance: float

    @classmethod
    def starting_at(cls, reward: float) -> RunningBaseline:
        return cls(1, reward, 0.0)

    def advantage(self, reward: float, scaled: bool) -> float:
        """Reward less the mean of those before it; `scaled`: divided by the standard deviation with it + 0.01.

        A scaled advantage is at most 1 / √(0.05 · 0.95) = 4.6 in magnitude.
        """
        centred = reward - self.mean
        return centred / (math.sqrt(self.including(reward).variance) + _RUNNING_EPSILON) if scaled else centred

    def including(self, reward: float) -> RunningBaseline:
        weight = max(1 / (self.count + 1), _NEWEST)
        centred = reward - self.mean
        variance = (1 - weight) * (self.variance + weight * centred**2)
        return RunningBaseline(self.count + 1, self.mean + weight * centred, variance)


PEOPLE = RunningBaseline(1, 0.5, 0.25)
"""Where people's scores begin: as if one of 0 and 1 had come, half of each. So the first thumb up, scored 1, counts
in favour of its sample, and the first thumb down, scored 0 or -1, counts against it."""


def equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by no more than rounding, so that a comparison says nothing."""
    return without_signal(rewards) is Unusable.ZERO_VARIANCE


def without_signal(rewards: Sequence[float]) -> Unusable | None:
    """Why a group of these rewards teaches nothing; None where it does."""
    return _unusable(np.asarray(rewards, np.float64))


def _unusable(rewards: _Rewards) -> Unusable | None:
    if not np.isfinite(rewards).all():
        return Unusable.NOT_FINITE
    if rewards.size < 2:
        return Unusable.SINGLE_MEMBER
    if np.ptp(rewards) <= _LEAST_SPREAD * np.abs(rewards).max():
        return Unusable.ZERO_VARIANCE
    return None


def _centred(rewards: _Rewards, scale: RewardScale, batch_divisor: float) -> GroupAdvantages:
    deviation, least = float(rewards.std()), _LEAST_DEVIATION * float(np.abs(rewards).max())
    divisor = max(deviation, least) + _EPSILON if scale is RewardScale.GROUP else batch_divisor
    values = tuple(((rewards - rewards.mean()) / divisor).tolist())
    return GroupAdvantages(values, strength=min(1.0, deviation / least))


def _batch_deviation(groups: Sequence[_Rewards]) -> float:
    finite = [group for group in groups if group.size and np.isfinite(group).all()]
    return float(np.concatenate(finite).std()) + _EPSILON if finite else 1.0
