"""Presence, frequency and repetition penalties over counts that live on the device.

A token drawn in one step is counted before anybody reads it, so the next step can be launched at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.rowwise import RowSubset
from mlx_parallm.core import SamplingParams


class TokenCounts:
    """What one penalised row has seen; owns its arrays, whatever batch the row is in.

    `prompt` bool [V]: tokens of the prompt. `generated` fp32 [V]: how often each was drawn, up to and
    including the step launched last.
    """

    __slots__ = ("generated", "prompt")

    def __init__(self, prompt: Sequence[int], generated: Sequence[int], vocab_size: int) -> None:
        """Pass what was generated before when a preempted row starts again; ids must be < vocab_size."""
        self.prompt = mx.array(np.bincount(np.asarray(prompt, np.int64), minlength=vocab_size) > 0)
        counts = np.bincount(np.asarray(generated, np.int64), minlength=vocab_size)
        self.generated = mx.array(counts.astype(np.float32))

    def add(self, token: mx.array) -> None:
        """Counts one drawn token, uint32 scalar, lazily."""
        self.generated = self.generated.at[token].add(1.0)


def has_penalties(params: SamplingParams) -> bool:
    """Whether the row needs `TokenCounts`."""
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


class Penalties:
    """The penalised rows of one batch; options as fp32 columns [P, 1]. None: no row has that penalty."""

    __slots__ = ("_counts", "_frequency", "_presence", "_prompt", "_repetition", "_row_numbers", "_rows")

    def __init__(self, params: Sequence[SamplingParams], counts: Sequence[TokenCounts], rows: list[int], batch: int):
        self._rows = RowSubset.of(rows, batch)
        self._row_numbers = rows
        self._counts = counts
        self._prompt = mx.stack([each.prompt for each in counts])
        self._presence = _column([p.presence_penalty for p in params], neutral=0.0)
        self._frequency = _column([p.frequency_penalty for p in params], neutral=0.0)
        self._repetition = _column([p.repetition_penalty for p in params], neutral=1.0)

    def apply(self, logits: mx.array) -> mx.array:
        """fp32 [R, V] → fp32 [R, V]. vLLM's arithmetic, in its order:

        repetition divides positive and multiplies negative logits of tokens in prompt or output;
        frequency subtracts its value per occurrence, presence once, over the output alone.
        """
        generated = mx.stack([counts.generated for counts in self._counts])
        occurs = generated > 0
        x = self._rows.take(logits)
        if self._repetition is not None:
            repeated = mx.maximum(x, 0.0) / self._repetition + mx.minimum(x, 0.0) * self._repetition
            x = mx.where(self._prompt | occurs, repeated, x)
        if self._frequency is not None:
            x = x - self._frequency * generated
        if self._presence is not None:
            x = x - self._presence * occurs
        return self._rows.put(x, logits)

    def count(self, tokens: mx.array) -> None:
        """Counts the batch's drawn tokens, uint32 [R], each in its own row."""
        for row, counts in zip(self._row_numbers, self._counts, strict=True):
            counts.add(tokens[row])


def _column(values: list[float], neutral: float) -> mx.array | None:
    return mx.array(values, mx.float32)[:, None] if any(value != neutral for value in values) else None
