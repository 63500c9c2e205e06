"""Group-relative advantages: each reward minus the mean of its group, scaled. Python and NumPy only.

Standard deviations divide by n, not by n - 1: rewards 0, 0, 1, 1 give advantages ±0.9998.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.config import RewardScale
from mlx_parallm.rl.collect.groups import DropReason

_EPSILON = 1e-4
"""Added to standard deviations."""

_LEAST_DEVIATION = 0.02
"""Fraction of the largest absolute reward. A group whose standard deviation is smaller than that has a weak signal."""

_LEAST_SPREAD = 1e-6
"""Fraction of the largest absolute reward. Rewards that differ by less are equal apart from rounding."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """`values`: one for each reward, in order; all 0 if the group is dropped. `dropped` None: the group is trained on.

    `strength`: how strong the group's signal is, 0 (dropped) to 1. An update of weak groups makes a smaller step.
    """

    values: tuple[float, ...]
    dropped: DropReason | None = None
    strength: float = 1.0

    @classmethod
    def none(cls, size: int, reason: DropReason) -> GroupAdvantages:
        return cls((0.0,) * size, reason, 0.0)


def group_advantages(groups: Sequence[Sequence[float]], scale: RewardScale) -> tuple[GroupAdvantages, ...]:
    """The advantages of all groups of one update, in order.

    GROUP divides by the group's standard deviation + 1e-4, but by at least 0.02 times its largest absolute reward, so
    that seven rewards of 1 and one of 0.999 do not get the advantages of seven rewards of 1 and one of 0. The strength
    of a group is its standard deviation divided by that minimum, at most 1, with every scale.

    BATCH divides by the standard deviation of all rewards of the update + 1e-4, pooled as they are: no group's mean is
    subtracted for it (arXiv 2508.08221). Rewards of dropped groups count in it. NONE divides by 1. With every scale,
    the group's mean is subtracted from its rewards.
    """
    rewards = [np.asarray(group, np.float64) for group in groups]
    pooled = np.concatenate(rewards) if rewards and scale is RewardScale.BATCH else np.zeros(0)
    divisor = float(pooled.std()) + _EPSILON if pooled.size else 1.0
    return tuple(
        GroupAdvantages.none(group.size, reason) if (reason := no_signal(group)) else _centred(group, scale, divisor)
        for group in rewards
    )


def no_signal(rewards: Sequence[float] | NDArray[np.float64]) -> DropReason | None:
    """Why a group with these rewards, which are finite, cannot be trained on; None if it can."""
    if len(rewards) < 2:
        return DropReason.SINGLE
    if np.ptp(rewards) <= _LEAST_SPREAD * np.abs(rewards).max():
        return DropReason.ZERO_VARIANCE
    return None


def _centred(rewards: NDArray[np.float64], scale: RewardScale, batch_divisor: float) -> GroupAdvantages:
    deviation, least = float(rewards.std()), _LEAST_DEVIATION * float(np.abs(rewards).max())
    divisor = max(deviation, least) + _EPSILON if scale is RewardScale.GROUP else batch_divisor
    values = tuple(((rewards - rewards.mean()) / divisor).tolist())
    return GroupAdvantages(values, strength=min(1.0, deviation / least))
