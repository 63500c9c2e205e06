"""How the losses of tokens are combined into the loss of an update, whatever micro-batches it is split into.

A reduction gives the factor of each sequence's sum of weighted token losses. The factors depend on totals of the whole
update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.config import ResolvedLoss
from mlx_parallm.rl.objectives.samples import Sample


@dataclass(frozen=True, slots=True)
class Denominators:
    """Totals of the whole update, as one micro-batch needs them: sequences N, the weight of all tokens ΣT_i, groups.

    The weight is the number of tokens if each has the weight 1. `group_weight`: for each row of the micro-batch, the
    weight of its group in the update, fp32 [B].
    """

    sequences: int
    weight: float
    groups: int
    group_weight: mx.array


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """Totals of one update. `tokens`: trained ones. `group_weight`: the sum of their weights in each group, by
    `Sample.group`."""

    sequences: int
    tokens: int
    group_weight: Mapping[int, float]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> UpdateTotals:
        """`samples`: all samples that the update trains on."""
        group_weight: dict[int, float] = defaultdict(float)
        for sample in samples:
            group_weight[sample.group] += sample.weight
        return cls(len(samples), sum(len(sample.trained()) for sample in samples), group_weight)

    def for_rows(self, rows: Sequence[Sample]) -> Denominators:
        """The denominators for one micro-batch."""
        per_row = mx.array([self.group_weight[row.group] for row in rows], mx.float32)
        return Denominators(self.sequences, sum(self.group_weight.values()), len(self.group_weight), per_row)


Reduction = Callable[[mx.array, Denominators, ResolvedLoss], mx.array]
"""(weights [B, C], denominators, config) → factors of the rows' sums, [B] or [1]."""


def sequence_mean(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """Mean over sequences of the mean over their tokens: 1 / (N T_i)."""
    return 1.0 / (_not_zero(weights.sum(-1)) * max(whole.sequences, 1))


def group_mean(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """Mean over groups of the mean over all tokens of the group, also if micro-batches split it."""
    return 1.0 / (_not_zero(whole.group_weight) * max(whole.groups, 1))


def token_mean(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """Mean over all tokens of the update: 1 / ΣT_i."""
    return mx.array([1.0 / (whole.weight or 1.0)])


def length_constant(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """1 / (N L_max): the weight of a token does not depend on the length of its sequence."""
    return mx.array([1.0 / (max(whole.sequences, 1) * config.max_completion_tokens)])


def plain_sum(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """The sum over all tokens: the caller has put every normalisation into weights and advantages."""
    return mx.array([1.0])


def _not_zero(weight: mx.array) -> mx.array:
    """1 in place of 0: the sum of a row without trained tokens is 0 anyway."""
    return mx.where(weight > 0, weight, 1.0)
