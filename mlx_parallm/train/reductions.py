"""How the losses of tokens are combined into the loss of an update, whatever micro-batches it is split into.

A reduction gives the factor of each sequence's sum of weighted token losses. The factors depend on totals of the whole
update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

import mlx.core as mx

from mlx_parallm.config import ResolvedLoss
from mlx_parallm.train.samples import Sample


@dataclass(frozen=True, slots=True)
class Denominators:
    """Totals of the whole update, as one micro-batch needs them: sequences N, and the weight of all tokens ΣT_i.

    The weight is the number of tokens if each has the weight 1. An episode counts as one sequence, also if it broke
    into several samples. `shares`: what part of its episode each row of the micro-batch is, fp32 [B].
    """

    sequences: float
    weight: float
    shares: mx.array


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """Totals of one update. `sequences`: see `Denominators`. `weight`: of all tokens."""

    sequences: float
    weight: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> UpdateTotals:
        """`samples`: all samples that the update trains on."""
        return cls(fsum(sample.share for sample in samples), fsum(sample.weight for sample in samples))

    def for_rows(self, rows: Sequence[Sample]) -> Denominators:
        """The denominators for one micro-batch."""
        return Denominators(self.sequences, self.weight, mx.array([row.share for row in rows], mx.float32))


Reduction = Callable[[mx.array, Denominators, ResolvedLoss], mx.array]
"""(weights [B, C], denominators, config) → factors of the rows' sums, [B] or [1]."""


def sequence_mean(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """Mean over episodes of the mean over their tokens: share / (N T_i). The shares of an episode's samples are those
    of its tokens, so that it does not matter into how many samples it broke."""
    return whole.shares / (_not_zero(weights.sum(-1)) * (whole.sequences or 1.0))


def token_mean(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """Mean over all tokens of the update: 1 / ΣT_i."""
    return mx.array([1.0 / (whole.weight or 1.0)])


def length_constant(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """1 / (N L_max): the weight of a token does not depend on the length of its sequence."""
    return mx.array([1.0 / ((whole.sequences or 1.0) * config.max_completion_tokens)])


def plain_sum(weights: mx.array, whole: Denominators, config: ResolvedLoss) -> mx.array:
    """The sum over all tokens: the caller has put every normalisation into weights and advantages."""
    return mx.array([1.0])


def _not_zero(weight: mx.array) -> mx.array:
    """1 in place of 0: the sum of a row without trained tokens is 0 anyway."""
    return mx.where(weight > 0, weight, 1.0)
