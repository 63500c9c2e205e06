"""From rewards to advantages: how much better than expected each trajectory was. Pure Python and NumPy.

Standard deviations are the population's (divided by n): rewards 0, 0, 1, 1 give advantages ±0.9998.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.rl.settings import RewardScale

_EPSILON = 1e-4
"""Added to the standard deviation."""

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
    """`values`: one for each reward, in order; all 0 where the group is dropped. `dropped` None: train on it."""

    values: tuple[float, ...]
    dropped: Unusable | None = None


def group_advantages(groups: Sequence[Sequence[float]], scale: RewardScale) -> tuple[GroupAdvantages, ...]:
    """Rewards less their group's mean, scaled; the groups of one update together, in order.

    GROUP divides by the group's standard deviation + 1e-4; BATCH by that of all rewards + 1e-4, not centred
    and with those of dropped groups (arXiv 2508.08221), but for groups that are not finite; NONE by 1.
    """
    rewards = [np.asarray(group, np.float64) for group in groups]
    reasons = [_unusable(group) for group in rewards]
    divisor = _batch_deviation(rewards) if scale is RewardScale.BATCH else 1.0
    return tuple(
        GroupAdvantages((0.0,) * group.size, reason) if reason else _centred(group, scale, divisor)
        for group, reason in zip(rewards, reasons, strict=True)
    )


@dataclass(frozen=True, slots=True)
class RunningBaseline:
    """Mean of all past rewards of one scorer: what an ungrouped sample is compared with."""

    count: int = 0
    mean: float = 0.0

    def advantage(self, reward: float) -> float | None:
        """Reward less the mean of those before it; None for the first one, which has nothing to be compared with."""
        return reward - self.mean if self.count else None

    def including(self, reward: float) -> RunningBaseline:
        return RunningBaseline(self.count + 1, self.mean + (reward - self.mean) / (self.count + 1))

    def to_dict(self) -> dict[str, float]:
        """JSON that `from_dict` restores to the bit."""
        return {"count": self.count, "mean": self.mean}

    @classmethod
    def from_dict(cls, saved: Mapping[str, float]) -> RunningBaseline:
        return cls(int(saved["count"]), float(saved["mean"]))


def _unusable(rewards: _Rewards) -> Unusable | None:
    if not np.isfinite(rewards).all():
        return Unusable.NOT_FINITE
    if rewards.size < 2:
        return Unusable.SINGLE_MEMBER
    if np.ptp(rewards) <= _LEAST_SPREAD * np.abs(rewards).max():
        return Unusable.ZERO_VARIANCE
    return None


def _centred(rewards: _Rewards, scale: RewardScale, batch_divisor: float) -> GroupAdvantages:
    divisor = float(rewards.std()) + _EPSILON if scale is RewardScale.GROUP else batch_divisor
    return GroupAdvantages(tuple(((rewards - rewards.mean()) / divisor).tolist()))


def _batch_deviation(groups: Sequence[_Rewards]) -> float:
    finite = [group for group in groups if group.size and np.isfinite(group).all()]
    return float(np.concatenate(finite).std()) + _EPSILON if finite else 1.0
