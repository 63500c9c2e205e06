"""Candidates → the batch of one update: advantages, what is left out and why, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from mlx_parallm.rl.advantages import GroupAdvantages, Unusable, group_advantages
from mlx_parallm.rl.candidates import Candidate
from mlx_parallm.rl.groups import Drop
from mlx_parallm.rl.rewards import RewardMemory
from mlx_parallm.rl.samples import Sample, UpdateBatch
from mlx_parallm.rl.settings import RewardScale

_DROPS = {
    Unusable.SINGLE_MEMBER: Drop.SINGLE,
    Unusable.ZERO_VARIANCE: Drop.ZERO_VARIANCE,
    Unusable.NOT_FINITE: Drop.NOT_FINITE,
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """`verdicts`: one for each candidate, in order; why it is not in the batch, None where it is."""

    batch: UpdateBatch
    verdicts: tuple[Drop | None, ...]


def prepare(candidates: Sequence[Candidate], scale: RewardScale, memory: RewardMemory) -> Prepared:
    """Groups are compared within themselves, single samples with their scorer's past (and are not scaled)."""
    together = iter(group_advantages([c.rewards for c in candidates if len(c.samples) > 1], scale))
    advantages = [next(together) if len(c.samples) > 1 else _alone(c, memory) for c in candidates]
    batch = UpdateBatch(_samples(candidates, advantages), _reward_figures(candidates) | _figures(candidates))
    return Prepared(batch, tuple(_DROPS[a.dropped] if a.dropped else None for a in advantages))


def prepare_imitation(candidates: Sequence[Candidate]) -> Prepared:
    """For the loss cross_entropy: every sample is to be imitated, whatever its reward."""
    advantages = [GroupAdvantages((1.0,) * len(c.samples)) for c in candidates]
    return Prepared(UpdateBatch(_samples(candidates, advantages), _figures(candidates)), (None,) * len(candidates))


def _alone(candidate: Candidate, memory: RewardMemory) -> GroupAdvantages:
    advantage = memory.advantage(candidate.scorer, candidate.rewards[0])
    if advantage is None:
        return GroupAdvantages((0.0,), Unusable.SINGLE_MEMBER)
    return GroupAdvantages((advantage,), None if advantage else Unusable.ZERO_VARIANCE)


def _samples(candidates: Sequence[Candidate], advantages: Sequence[GroupAdvantages]) -> tuple[Sample, ...]:
    return tuple(
        replace(sample, advantage=value, group=number)
        for number, (candidate, group) in enumerate(zip(candidates, advantages, strict=True))
        if group.dropped is None
        for sample, value in zip(candidate.samples, group.values, strict=True)
    )


def _reward_figures(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Of all rewards, those of groups that are left out too; the population's standard deviation."""
    rewards = np.array(list(chain.from_iterable(c.rewards for c in candidates)), np.float64)
    return {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())} if rewards.size else {}


def _figures(candidates: Sequence[Candidate]) -> dict[str, float]:
    samples = [sample for candidate in candidates for sample in candidate.samples]
    lags = [candidate.lag for candidate in candidates for _ in candidate.samples]
    if not samples:
        return {}
    return {
        "groups": float(len(candidates)),
        "trajectories": float(len(samples)),
        "completion_tokens": float(np.mean([len(sample.completion_ids) for sample in samples])),
        "staleness": float(np.mean(lags)),
        "staleness_max": float(max(lags)),
    }
