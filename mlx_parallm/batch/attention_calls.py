"""Which attention calls a forward pass makes, and which tokens each of them has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import mlx.core as mx

from mlx_parallm.batch.attention import DenseSpan, are_consecutive
from mlx_parallm.batch.block_attention import BlockAttention, calls, folds_work
from mlx_parallm.batch.spans import Kind, RowBlocks, kind_of
from mlx_parallm.model.linears import LatentHeads


class Attention(Protocol):
    """Attention of some of a pass's tokens, in one layer group."""

    def attend(
        self, keys: mx.array, values: mx.array, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Queries [n, heads, 1, head_dim] → [n, heads, 1, head_dim of values]. `keys`, `values`: of all blocks,
        [kv_heads, places, 64, head_dim]."""
        ...

    def advance(self) -> None:
        """Moves on to the next token of each row, in the same blocks."""


class AttentionCalls:
    """The attention of all tokens of a pass in one layer group, in as few calls as pay.

    Args:
        rows: the tokens of the pass in order, with the blocks that they see.
        dense_rows: see `Forward`.
    """

    def __init__(self, rows: Sequence[RowBlocks], window: int | None, dense_rows: float) -> None:
        self._calls = list(_calls(rows, window, dense_rows))

    def advance(self) -> None:
        """See `Attention.advance`."""
        for _, call in self._calls:
            call.advance()

    def attend(
        self,
        keys: mx.array,
        values: mx.array,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        heads: LatentHeads | None = None,
    ) -> mx.array:
        """See `Attention.attend`; of all tokens. A layer that keeps no values attends to the keys as values.

        `heads`: of latent attention, if their products are left to it. Queries and outputs are then those of heads.
        """
        if heads is not None:
            return mx.concatenate([_of_heads(call, keys, queries, heads, tokens) for tokens, call in self._calls])
        values = values if values.size else keys
        if len(self._calls) == 1:
            return self._calls[0][1].attend(keys, values, queries, scale, sinks)
        outputs = [call.attend(keys, values, queries[tokens], scale, sinks) for tokens, call in self._calls]
        return mx.concatenate(outputs)


def _of_heads(call: Attention, keys: mx.array, queries: mx.array, heads: LatentHeads, tokens: slice) -> mx.array:
    """Latent attention of one call's tokens, in the form that is less work."""
    with heads.bank.using_part(tokens.start, tokens.stop):
        if isinstance(call, DenseSpan) and heads.is_expanded(call.row.tokens, call.row.stop, keys.shape[-1]):
            return call.attend(keys, keys, queries[tokens], 1.0, None, heads)
        return heads.absorbed(queries[tokens], lambda absorbed: call.attend(keys, keys, absorbed, 1.0, None))


def _calls(rows: Sequence[RowBlocks], window: int | None, dense_rows: float) -> Iterator[tuple[slice, Attention]]:
    """The attention calls, each with its tokens."""
    start = 0
    for kind, group in groupby(rows, key=lambda row: kind_of(row.tokens)):
        together = list(group)
        attentions: list[tuple[Attention, int]]
        if _is_dense(kind, together, dense_rows):
            attentions = [(DenseSpan(row, window), row.tokens) for row in together]
        else:
            attentions = [(BlockAttention(call, window), sum(row.tokens for row in call)) for call in calls(together)]
        for attention, tokens in attentions:
            yield slice(start, start + tokens), attention
            start += tokens


def _is_dense(kind: Kind, rows: Sequence[RowBlocks], dense_rows: float) -> bool:
    """Whether rows of one kind attend one by one, each to dense keys, and not in one call by pairs."""
    if math.isinf(dense_rows) or kind is Kind.LONG:
        return True
    if kind is Kind.SHORT:
        return len(rows) == 1 or not folds_work()
    return len(rows) <= dense_rows and all(are_consecutive(row.places) for row in rows)
