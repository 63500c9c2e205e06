"""Presence, frequency and repetition penalties over counts that live on the device.

A token drawn in one step is counted before anybody reads it, so the next step can be launched at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.rowwise import RowSubset
from mlx_parallm.core import SamplingParams


class _Table:
    """`generated` fp32 [P, V]: how often each of P rows has drawn each token, launched steps included."""

    __slots__ = ("generated",)

    def __init__(self, generated: mx.array) -> None:
        self.generated = generated


class TokenCounts:
    """What one penalised row has seen, whatever batch the row is in.

    Host data until a plan first takes the row in; from then on one row of the plan's table, which the next plan copies.
    """

    __slots__ = ("_generated", "_place", "_prompt", "_table", "vocab_size")

    def __init__(self, prompt: Sequence[int], generated: Sequence[int], vocab_size: int) -> None:
        """Pass what was generated before when a preempted row starts again; ids must be < vocab_size."""
        self.vocab_size = vocab_size
        self._prompt = np.unique(np.asarray(prompt, np.int64))
        self._generated = np.asarray(generated, np.int64)
        self._table: _Table | None = None
        self._place = 0

    def prompt(self) -> mx.array:
        """bool [V]: tokens of the prompt."""
        seen = np.zeros(self.vocab_size, bool)
        seen[self._prompt] = True
        return mx.array(seen)

    def generated(self) -> mx.array:
        """fp32 [V]: how often each token was drawn, up to and including the step launched last."""
        if self._table is not None:
            return self._table.generated[self._place]
        return mx.array(np.bincount(self._generated, minlength=self.vocab_size).astype(np.float32))

    def move(self, table: _Table, place: int) -> None:
        """From now on the row is counted at `place` of `table`, which holds what was counted before."""
        self._table, self._place = table, place


def has_penalties(params: SamplingParams) -> bool:
    """Whether the row needs `TokenCounts`."""
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


class Penalties:
    """The penalised rows of one batch; options as fp32 columns [P, 1]. None: no row has that penalty."""

    __slots__ = ("_frequency", "_places", "_presence", "_prompt", "_repetition", "_rows", "_table")

    def __init__(self, params: Sequence[SamplingParams], counts: Sequence[TokenCounts], rows: list[int], batch: int):
        self._rows = RowSubset.of(rows, batch)
        self._places = mx.arange(len(counts))
        self._presence = _column([p.presence_penalty for p in params], neutral=0.0)
        self._frequency = _column([p.frequency_penalty for p in params], neutral=0.0)
        self._repetition = _column([p.repetition_penalty for p in params], neutral=1.0)
        self._prompt = None if self._repetition is None else mx.stack([each.prompt() for each in counts])
        self._table = _Table(mx.stack([each.generated() for each in counts]))
        for place, each in enumerate(counts):
            each.move(self._table, place)

    def apply(self, logits: mx.array) -> mx.array:
        """fp32 [R, V] → fp32 [R, V]. vLLM's arithmetic, in its order:

        repetition divides positive and multiplies negative logits of tokens in prompt or output;
        frequency subtracts its value per occurrence, presence once, over the output alone.
        """
        generated = self._table.generated
        occurs = generated > 0
        x = self._rows.take(logits)
        if self._repetition is not None and self._prompt is not None:
            repeated = mx.maximum(x, 0.0) / self._repetition + mx.minimum(x, 0.0) * self._repetition
            x = mx.where(self._prompt | occurs, repeated, x)
        if self._frequency is not None:
            x = x - self._frequency * generated
        if self._presence is not None:
            x = x - self._presence * occurs
        return self._rows.put(x, logits)

    def count(self, tokens: mx.array) -> None:
        """Counts the batch's drawn tokens, uint32 [R], each in its own row: one scatter."""
        drawn = self._rows.take(tokens)
        self._table.generated = self._table.generated.at[self._places, drawn].add(1.0)


def _column(values: list[float], neutral: float) -> mx.array | None:
    return mx.array(values, mx.float32)[:, None] if any(value != neutral for value in values) else None
