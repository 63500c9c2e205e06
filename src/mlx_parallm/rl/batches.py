"""Candidates → the batch of one update: advantages, what is left out and why, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from mlx_parallm.rl.advantages import GroupAdvantages, Unusable, equal, group_advantages, without_signal
from mlx_parallm.rl.candidates import Candidate
from mlx_parallm.rl.groups import FEEDBACK, Drop, Group
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


def no_signal(group: Group) -> Drop | None:
    """Why a complete group teaches nothing, if its rewards alone say so."""
    rewards = [member.reward for member in group.scored if member.reward is not None]
    if group.scorer is None or len(rewards) < 2 or all(member.judged for member in group.scored):
        return None  # it is compared with its scorer's past
    reason = without_signal(rewards)
    return _DROPS[reason] if reason else None


def prepare(
    candidates: Sequence[Candidate], scale: RewardScale, memory: RewardMemory, wanted: int | None = None
) -> Prepared:
    """Groups are compared within themselves, samples that stand alone with their scorer's past.

    `wanted`: how many trajectories with a signal make a whole update; None, or more than there are: all of them. With
    fewer the update's step is smaller by as much.
    """
    together = iter(group_advantages([c.rewards for c in candidates if not _stands_alone(c)], scale))
    scaled = scale is not RewardScale.NONE
    advantages = [_alone(c, memory, scaled) if _stands_alone(c) else next(together) for c in candidates]
    figures = _reward_figures(candidates) | _figures(candidates)
    batch = UpdateBatch(_samples(candidates, advantages), figures, _step_scale(advantages, wanted))
    return Prepared(batch, tuple(_DROPS[a.dropped] if a.dropped else None for a in advantages))


def prepare_imitation(candidates: Sequence[Candidate], threshold: float) -> Prepared:
    """For the loss cross_entropy: imitates samples with a reward above `threshold`, and those given without one."""
    kept = [_worthy(candidate, threshold) for candidate in candidates]
    batch = UpdateBatch(_samples(kept, [GroupAdvantages((1.0,) * len(c.samples)) for c in kept]), _figures(kept))
    return Prepared(batch, tuple(None if candidate.samples else Drop.LOW_REWARD for candidate in kept))


def _worthy(candidate: Candidate, threshold: float) -> Candidate:
    if not candidate.rewards:
        return candidate
    kept = [at for at, reward in enumerate(candidate.rewards) if reward > threshold]
    samples, rewards = tuple(candidate.samples[at] for at in kept), tuple(candidate.rewards[at] for at in kept)
    return replace(candidate, samples=samples, rewards=rewards)


def _stands_alone(candidate: Candidate) -> bool:
    """People who gave all samples of a prompt the same score did say something: that all are good, or bad."""
    return len(candidate.samples) == 1 or (candidate.scorer == FEEDBACK and equal(candidate.rewards))


def _alone(candidate: Candidate, memory: RewardMemory, scaled: bool) -> GroupAdvantages:
    advantages = [memory.advantage(candidate.scorer, reward, scaled) for reward in candidate.rewards]
    values = tuple(advantage or 0.0 for advantage in advantages)
    if None in advantages:
        return GroupAdvantages.none(len(values), Unusable.SINGLE_MEMBER)
    if not any(values):
        return GroupAdvantages.none(len(values), Unusable.ZERO_VARIANCE)
    return GroupAdvantages(values, strength=min(1.0, float(np.abs(values).mean())) if scaled else 1.0)


def _step_scale(advantages: Sequence[GroupAdvantages], wanted: int | None) -> float:
    """The share of the trajectories asked for that have a signal, weak ones counted in part."""
    all_of_them = sum(len(group.values) for group in advantages)
    asked = all_of_them if wanted is None else min(wanted, all_of_them)
    with_signal = sum(group.strength * len(group.values) for group in advantages)
    return min(1.0, with_signal / asked) if asked else 1.0


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
