"""The batch of an update that looks for a way out of a plateau, where rewards within a group teach nothing.

    better answers are known   all answers of the update and those are compared with each other by their rewards
    none is known              the answers that earn what nearly all earn are compared by their lengths: short is better

Learning good answers again is self-imitation (Oh et al. 2018, arXiv 1806.05635). Short answers cost less and earn as
much, and a policy whose answers are cut off by their limit learns to end them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.config import ResolvedLoss
from mlx_parallm.core import FinishReason
from mlx_parallm.rl.collect.groups import DropReason
from mlx_parallm.rl.objectives.advantages import EPSILON, GroupAdvantages, no_signal
from mlx_parallm.rl.objectives.batches import PreparedBatch, ScoredGroup, batch_of


def prepare_exploring(groups: Sequence[ScoredGroup], loss: ResolvedLoss) -> PreparedBatch:
    """The batch of one update on a plateau. Its `step_scale` is 1."""
    scores = np.array(list(chain.from_iterable(group.rewards for group in groups)), np.float64)
    if not any(group.remembered for group in groups):
        scores = _by_length(groups, scores)
    if no_signal(scores):
        return batch_of(groups, [GroupAdvantages.none(len(g.rewards), DropReason.ZERO_VARIANCE) for g in groups], loss)
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
