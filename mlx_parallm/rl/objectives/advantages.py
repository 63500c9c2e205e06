"""The advantages of groups of rewards: each reward minus the mean of its group, scaled.

Standard deviations divide by n, not by n - 1, so the rewards 0, 0, 1, 1 give advantages of ±0.9998.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.config import RewardScale
from mlx_parallm.rl.collect.groups import DropReason

EPSILON = 1e-4
"""Added to standard deviations."""

_LEAST_DEVIATION = 0.02
"""A group has a weak signal if its standard deviation is below this fraction of its scorer's `RunningRange.width`."""

_LEAST_SPREAD = 1e-12
"""Rewards that differ by at most this fraction of the largest absolute reward are equal apart from the rounding of
float64. It is small, since a number that is added to all rewards must not hide their differences."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """The advantages of one group. `values`: one for each reward, in order; all 0 if the group is dropped.

    `divisor`: what centred rewards were divided by; None if they were not centred. `dropped`: why the group is dropped;
    None if it is trained on. `strength`: how strong the group's signal is, 0 (dropped) to 1. An update of weak groups
    makes a smaller step. `values` are relative to the strongest group of the update, so that this counts once.
    """

    values: tuple[float, ...]
    dropped: DropReason | None = None
    strength: float = 1.0
    divisor: float | None = None

    @classmethod
    def none(cls, size: int, reason: DropReason) -> GroupAdvantages:
        return cls((0.0,) * size, reason, 0.0)


def group_advantages(
    groups: Sequence[Sequence[float]],
    scale: RewardScale,
    ranges: Sequence[float],
    token_deviations: Sequence[float],
) -> tuple[GroupAdvantages, ...]:
    """The advantages of all groups of one update, in order. A number that is added to all rewards changes nothing.

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
    reasons = [no_signal(group) for group in rewards]
    deviations = [0.0 if reason else float(group.std()) for group, reason in zip(rewards, reasons, strict=True)]
    deviations = [max(own, of_tokens) for own, of_tokens in zip(deviations, token_deviations, strict=True)]
    strengths = [
        min(1.0, own / (_LEAST_DEVIATION * width or own or 1.0)) for own, width in zip(deviations, ranges, strict=True)
    ]
    strongest = max(strengths, default=0.0)
    pooled = np.concatenate(rewards) if rewards and scale is RewardScale.BATCH else np.zeros(0)
    of_all = max(float(pooled.std()), *token_deviations, 0.0) + EPSILON if pooled.size else 1.0

    def centred(group: NDArray[np.float64], deviation: float, strength: float) -> GroupAdvantages:
        divisor = deviation * strongest / strength + EPSILON if scale is RewardScale.GROUP else of_all
        return GroupAdvantages(tuple(((group - group.mean()) / divisor).tolist()), None, strength, divisor)

    return tuple(
        centred(group, deviation, strength)
        if strength
        else GroupAdvantages.none(group.size, reason or DropReason.ZERO_VARIANCE)
        for group, reason, deviation, strength in zip(rewards, reasons, deviations, strengths, strict=True)
    )


def reward_range(rewards: Sequence[float] | NDArray[np.float64]) -> float:
    """The largest reward of a group minus its smallest one; 0 if there is none."""
    return float(np.ptp(rewards)) if len(rewards) else 0.0


def no_signal(rewards: Sequence[float] | NDArray[np.float64]) -> DropReason | None:
    """Why a group with these rewards, which are finite, cannot be trained on; None if it can."""
    if len(rewards) < 2:
        return DropReason.SINGLE
    if np.ptp(rewards) <= _LEAST_SPREAD * np.abs(rewards).max():
        return DropReason.ZERO_VARIANCE
    return None
