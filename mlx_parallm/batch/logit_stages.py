"""Stages of sampling that change a batch's logits: penalties, bias and end-token bans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.rowwise import RowSubset
from mlx_parallm.core import SamplingParams

# ---- penalties ---------------------------------------------------------------------------------


class _CountTable:
    """`generated` fp32 [P, V]: how often each of P rows has drawn each token, including tokens not read back yet."""

    __slots__ = ("generated",)

    def __init__(self, generated: mx.array) -> None:
        self.generated = generated


class TokenCounts:
    """How often a row with penalties has seen each token. The row keeps it from batch to batch.

    The counts live on the device, so a token is counted before its id reaches the host. They start as host data; when
    a plan first includes the row, they become one row of the plan's table, which later plans copy.
    """

    __slots__ = ("_generated", "_place", "_prompt", "_table", "vocab_size")

    def __init__(self, prompt: Sequence[int], generated: Sequence[int], vocab_size: int) -> None:
        """Token ids must be < vocab_size. `generated` is not empty when a preempted row starts again."""
        self.vocab_size = vocab_size
        self._prompt = np.unique(np.asarray(prompt, np.int64))
        self._generated = np.asarray(generated, np.int64)
        self._table: _CountTable | None = None
        self._place = 0

    def prompt(self) -> mx.array:
        """bool [V]: tokens of the prompt."""
        seen = np.zeros(self.vocab_size, bool)
        seen[self._prompt] = True
        return mx.array(seen)

    def generated(self) -> mx.array:
        """fp32 [V]: how often each token was drawn, including the pass launched last."""
        if self._table is not None:
            return self._table.generated[self._place]
        return mx.array(np.bincount(self._generated, minlength=self.vocab_size).astype(np.float32))

    def after(self, tokens: Sequence[int]) -> TokenCounts:
        """The counts of the row if it had drawn these tokens too."""
        following = TokenCounts((), (), self.vocab_size)
        following._prompt = self._prompt
        following._table = _CountTable((self.generated().at[mx.array(list(tokens))].add(1.0))[None])
        return following

    def move(self, table: _CountTable, place: int) -> None:
        """From now on the counts are row `place` of `table`, which already includes the counts so far."""
        self._table, self._place = table, place


def has_penalties(params: SamplingParams) -> bool:
    """Whether a row with these options needs `TokenCounts`."""
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


class Penalties:
    """Presence, frequency and repetition penalties of a batch.

    Args:
        params, counts: of the rows with penalties.
        rows: the numbers of these rows in the batch, ascending.
        batch: the number of rows in the batch.
    """

    __slots__ = ("_frequency", "_places", "_presence", "_prompt", "_repetition", "_rows", "_table")

    def __init__(self, params: Sequence[SamplingParams], counts: Sequence[TokenCounts], rows: list[int], batch: int):
        self._rows = RowSubset.of(rows, batch)
        self._places = mx.arange(len(counts))
        self._presence = _column([p.presence_penalty for p in params], neutral=0.0)
        self._frequency = _column([p.frequency_penalty for p in params], neutral=0.0)
        self._repetition = _column([p.repetition_penalty for p in params], neutral=1.0)
        self._prompt = None if self._repetition is None else mx.stack([each.prompt() for each in counts])
        self._table = _CountTable(mx.stack([each.generated() for each in counts]))
        for place, each in enumerate(counts):
            each.move(self._table, place)

    def apply(self, logits: mx.array) -> mx.array:
        """fp32 [R, V] → fp32 [R, V], with vLLM's arithmetic in vLLM's order.

        The repetition penalty divides positive and multiplies negative logits of tokens in the prompt or the output.
        Frequency is subtracted once for each occurrence in the output, presence once for each token in the output.
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
        """Counts the batch's drawn tokens, uint32 [R], each in its own row, with one scatter."""
        drawn = self._rows.take(tokens)
        self._table.generated = self._table.generated.at[self._places, drawn].add(1.0)


def _column(values: list[float], neutral: float) -> mx.array | None:
    """fp32 [P, 1], or None if every value is neutral."""
    return mx.array(values, mx.float32)[:, None] if any(value != neutral for value in values) else None


# ---- logit_bias and min_tokens -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """Adds `value` to the logit of `token` in `row` while the row has generated fewer than `until` tokens."""

    row: int
    token: int
    value: float
    until: float = math.inf


class LogitEdits:
    """All edits of a batch, applied with one scatter. Edits of the same token add up."""

    __slots__ = ("_mx_rows", "_rows", "_tokens", "_until", "_values")

    def __init__(self, edits: Sequence[LogitEdit]) -> None:
        self._rows = np.array([edit.row for edit in edits], np.int32)
        self._values = np.array([edit.value for edit in edits], np.float32)
        self._until = np.array([edit.until for edit in edits], np.float64)
        self._mx_rows = mx.array(self._rows)
        self._tokens = mx.array([edit.token for edit in edits], mx.int32)

    def apply(self, logits: mx.array, positions: NDArray[np.int64]) -> mx.array:
        """fp32 [R, V] → fp32 [R, V]. `positions` [R]: tokens that each row has generated so far."""
        live = positions[self._rows] < self._until
        if not live.any():
            return logits
        return logits.at[self._mx_rows, self._tokens].add(mx.array(np.where(live, self._values, np.float32(0))))
