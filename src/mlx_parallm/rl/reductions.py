"""From losses of tokens to the loss of an update: what each row's sum is multiplied by.

Denominators are figures of the whole update, so the contributions of its micro-batches add up to its loss however it
is split between them. Micro-batch means would not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.rl.samples import Sample
from mlx_parallm.rl.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Denominators:
    """Of the whole update: its sequences N, trained tokens ΣT_i and groups.

    `group_tokens`: fp32 [B], for each row of the micro-batch the trained tokens that its group has in the update.
    """

    sequences: int
    tokens: int
    groups: int
    group_tokens: mx.array


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """What `Denominators` are made of. `group_tokens`: by `Sample.group`."""

    sequences: int
    tokens: int
    group_tokens: Mapping[int, int]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> UpdateTotals:
        """`samples`: all those the update trains on, and no dropped ones."""
        group_tokens: Counter[int] = Counter()
        for sample in samples:
            group_tokens[sample.group] += len(sample.completion_ids)
        return cls(len(samples), group_tokens.total(), group_tokens)

    def for_rows(self, rows: Sequence[Sample]) -> Denominators:
        """Of one micro-batch."""
        per_row = mx.array([self.group_tokens[row.group] for row in rows], mx.float32)
        return Denominators(self.sequences, self.tokens, len(self.group_tokens), per_row)


Reduction = Callable[[mx.array, Denominators, LossSettings], mx.array]
"""(mask [B, C], denominators, settings) → weights of the rows' sums, [B] or [1]."""


def sequence_mean(mask: mx.array, whole: Denominators, settings: LossSettings) -> mx.array:
    """Mean over sequences of the mean over their tokens: 1 / (N T_i)."""
    return 1.0 / (mx.maximum(mask.sum(-1), 1.0) * max(whole.sequences, 1))


def group_mean(mask: mx.array, whole: Denominators, settings: LossSettings) -> mx.array:
    """Mean over groups of the mean over all their tokens, wherever micro-batches split them."""
    return 1.0 / (mx.maximum(whole.group_tokens, 1.0) * max(whole.groups, 1))


def token_mean(mask: mx.array, whole: Denominators, settings: LossSettings) -> mx.array:
    """Mean over all tokens of the update: 1 / ΣT_i."""
    return mx.array([1.0 / max(whole.tokens, 1)])


def length_constant(mask: mx.array, whole: Denominators, settings: LossSettings) -> mx.array:
    """1 / (N L_max): a token's weight depends on no sequence's length."""
    return mx.array([1.0 / (max(whole.sequences, 1) * settings.max_length)])
