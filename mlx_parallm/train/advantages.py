"""The advantages of groups of rewards: each reward minus the mean of its group, scaled.

Standard deviations divide by n, not by n - 1, so the rewards 0, 0, 1, 1 give advantages of ±0.9998.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.config import RewardScale

EPSILON = 1e-4
"""Added to standard deviations."""

_LEAST_DEVIATION = 0.02
"""A group has a weak signal if its standard deviation is below this fraction of its scorer's `RunningRange.width`."""

_LEAST_SPREAD = 1e-12
"""Rewards that differ by at most this fraction of the largest absolute reward are equal apart from the rounding of
float64. It is small, since a number that is added to all rewards must not hide their differences."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """The advantages of one group that is trained on. `values`: one for each of its members, in order.

    `divisor`: what centred rewards were divided by; None if they were not centred. `strength`: how strong the group's
    signal is, above 0 and at most 1. An update of weak groups makes a smaller step. `values` are relative to the
    strongest group of the update, so that this counts once.
    """

    values: tuple[float, ...]
    strength: float = 1.0
    divisor: float | None = None


def group_advantages(
    groups: Sequence[Sequence[float]],
    scale: RewardScale,
    ranges: Sequence[float],
    token_deviations: Sequence[float],
) -> tuple[GroupAdvantages | None, ...]:
    """The advantages of all groups of one update, in order; None if a group has no signal. A number that is added to
    all rewards changes nothing.

    The strength of a group is its standard deviation divided by 0.02 times a wide range (largest minus smallest reward)
    of groups with the same scorer, at most 1. So seven rewards of 1 and one of 0.999 are a weak signal where others
    are 0. Each reward minus the mean of its group is divided by a number that depends on `scale`.

    GROUP: the group's deviation + 1e-4. The advantages of a group that is weaker than the strongest one of the
    update are smaller in proportion. Weakness that all groups share makes the step smaller, and not the advantages.

    BATCH: the standard deviation of all rewards of the update, or the largest one of tokens, + 1e-4. No group's mean is
    subtracted to compute it (arXiv 2508.08221), and the rewards of dropped groups count. NONE: 1.

    Args:
        ranges: for each group, that range; see `RewardHistory.ranges`.
        token_deviations: for each group, see `token_deviation`. The deviation of a group is at least this, so that
            credits of tokens are of the usual size even if rewards are (nearly) equal.
    """
    rewards = [np.asarray(group, np.float64) for group in groups]
    deviations = [
        max(float(group.std()) if differ(group) else 0.0, of_tokens)
        for group, of_tokens in zip(rewards, token_deviations, strict=True)
    ]
    strengths = [
        min(1.0, own / (_LEAST_DEVIATION * width or own or 1.0)) for own, width in zip(deviations, ranges, strict=True)
    ]
    strongest = max(strengths, default=0.0)
    pooled = np.concatenate(rewards) if rewards and scale is RewardScale.BATCH else np.zeros(0)
    of_all = max(float(pooled.std()), *token_deviations, 0.0) + EPSILON if pooled.size else 1.0

    def centred(group: NDArray[np.float64], deviation: float, strength: float) -> GroupAdvantages:
        divisor = deviation * strongest / strength + EPSILON if scale is RewardScale.GROUP else of_all
        return GroupAdvantages(tuple(((group - group.mean()) / divisor).tolist()), strength, divisor)

    return tuple(
        centred(group, deviation, strength) if strength else None
        for group, deviation, strength in zip(rewards, deviations, strengths, strict=True)
    )


def reward_range(rewards: Sequence[float] | NDArray[np.float64]) -> float:
    """The largest reward of a group minus its smallest one; 0 if there is none."""
    return float(np.ptp(rewards)) if len(rewards) else 0.0


def differ(rewards: Sequence[float] | NDArray[np.float64]) -> bool:
    """Whether there are two rewards, which are finite, that differ by more than the rounding of float64."""
    return len(rewards) > 1 and bool(np.ptp(rewards) > _LEAST_SPREAD * np.abs(rewards).max())
