"""The batch of an update by what its groups teach: each signal has its own loss, and the adapter is the same.

    rewards         the configured loss
    late feedback   kto: people were for an answer or against it
    preferences     dpo: a chosen answer and a rejected one
    corrections     cross_entropy: an answer to imitate

The losses of the last three compare the policy with the base model or with nothing: they are off-policy, and limits of
staleness do not apply.

An update of rewards that looks for a way out of a plateau, where rewards within a group teach nothing, has a batch of
its own:

    better answers are known   all answers of the update and those are compared with each other by their rewards
    none is known              the answers that earn what nearly all earn are compared by their lengths: short is better

Learning good answers again is self-imitation (Oh et al. 2018, arXiv 1806.05635). Short answers cost less and earn as
much, and a policy whose answers are cut off by their limit learns to end them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.config import Algorithm, ResolvedLoss, RewardScale
from mlx_parallm.core.requests import FinishReason, Signal
from mlx_parallm.rl.objectives.batches import Advantages, PreparedBatch, ScoredGroup, batch_of, prepare
from mlx_parallm.rl.objectives.rewards import RewardHistory
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.train.advantages import EPSILON, GroupAdvantages, differ


def prepare_exploring(groups: Sequence[ScoredGroup], loss: ResolvedLoss) -> PreparedBatch:
    """The batch of one update on a plateau. Its `step_scale` is 1."""
    scores = np.array(list(chain.from_iterable(group.rewards for group in groups)), np.float64)
    if not any(group.remembered for group in groups):
        scores = _by_length(groups, scores)
    if not differ(scores):
        return batch_of(groups, [DropReason.ZERO_VARIANCE] * len(groups), loss)
    values = iter(((scores - scores.mean()) / (scores.std() + EPSILON)).tolist())
    advantages = [GroupAdvantages(tuple(next(values) for _ in group.rewards)) for group in groups]
    return batch_of(groups, advantages, loss)


def _by_length(groups: Sequence[ScoredGroup], rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Minus the number of tokens of each answer, one more if it was cut off. Answers that earn less than the best of
    them are worse than all others."""
    episodes = list(chain.from_iterable(group.episodes for group in groups))
    cut_off = [episode.finish_reason is FinishReason.LENGTH for episode in episodes]
    lengths = np.array([episode.completion_tokens for episode in episodes], np.float64) + cut_off
    return -np.where(rewards < rewards.max(), lengths.max() + 1, lengths)


_ALGORITHMS: Mapping[Signal, Algorithm] = {
    Signal.LATE_FEEDBACK: Algorithm.KTO,
    Signal.PREFERENCES: Algorithm.DPO,
    Signal.CORRECTIONS: Algorithm.CROSS_ENTROPY,
}
_OF_REWARDS = ("reward_mean", "reward_std")
"""Metrics that say nothing about groups whose rewards stand for a choice."""


def signal_of(groups: Sequence[ScoredGroup]) -> Signal:
    """What the groups of one update teach; they all teach the same."""
    return groups[0].signal if groups else Signal.REWARDS


def loss_of(signal: Signal, configured: ResolvedLoss) -> ResolvedLoss:
    """The loss of an update that learns from this signal. Its coefficients are those of the configured one."""
    if signal is Signal.REWARDS:
        return configured
    return configured.model_copy(update={"algorithm": _ALGORITHMS[signal], "scale_rewards": RewardScale.NONE})


def prepare_signal(
    groups: Sequence[ScoredGroup],
    configured: ResolvedLoss,
    history: RewardHistory,
    wanted: int | None = None,
    explores: bool = False,
) -> PreparedBatch:
    """The batch of one update on groups that teach the same; see `prepare`. `explores`: see `prepare_exploring`."""
    signal = signal_of(groups)
    loss = loss_of(signal, configured)
    if explores:
        return prepare_exploring(groups, loss)
    if signal is Signal.REWARDS:
        return prepare(groups, loss, history, wanted)
    if signal is Signal.LATE_FEEDBACK:
        verdicts = [_verdict(group) for group in groups]
        loss = _balanced(loss, [each.values[0] for each in verdicts if isinstance(each, GroupAdvantages)])
        prepared = batch_of(groups, verdicts, loss, wanted)
    else:
        prepared = prepare(groups, loss, history, wanted)
    batch = prepared.batch
    metrics = {name: value for name, value in batch.metrics.items() if name not in _OF_REWARDS}
    return replace(prepared, batch=replace(batch, metrics=metrics, loss=loss))


def _balanced(loss: ResolvedLoss, verdicts: Sequence[float]) -> ResolvedLoss:
    """The loss of an update whose answers people were for (1) or against (-1).

    Both kinds weigh the same in sum, times their configured weights, as the paper on KTO advises (arXiv 2402.01306,
    section 4.2). People are mostly against the answers of a model that has much to learn; without this, nearly all that
    an update does is to make what the model says less likely.
    """
    liked, disliked = verdicts.count(1.0), verdicts.count(-1.0)
    if not liked or not disliked:
        return loss
    mean = (liked + disliked) / 2
    return loss.model_copy(
        update={
            "kto_desirable_weight": loss.kto_desirable_weight * mean / liked,
            "kto_undesirable_weight": loss.kto_undesirable_weight * mean / disliked,
        }
    )


def _verdict(group: ScoredGroup) -> Advantages:
    """1 if most people were for the answer, -1 if most were against it. As many for it as against it say nothing."""
    reward = group.rewards[0]
    if reward == 0:
        return DropReason.ZERO_VARIANCE
    return GroupAdvantages((1.0 if reward > 0 else -1.0,))
