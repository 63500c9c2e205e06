"""One forward pass over rows of the KV pool: single tokens of many rows, and chunks of others, together.

spans       row a: 1 token   row b: 1 token   row c: 5 tokens       single tokens come first
tokens      [N, 1]           to the model, a batch of N single tokens, each at its own position
write       one scatter per layer for all N
attention   one call for all single tokens and one for all short chunks (by pairs of row and block), or a few calls if
            their lengths differ much, and one for each long chunk (dense and causal)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.attention_calls import AttentionCalls, kind_of
from mlx_parallm.batch.block_attention import RowBlocks
from mlx_parallm.batch.quantized_forward import QuantizedGroupForward
from mlx_parallm.kv.arena import Lines, lines_of
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import KVRow, LayerGroup, LoRABatchedKVCache
from mlx_parallm.model.linears import LatentHeads

R = TypeVar("R", bound=KVRow)
R_co = TypeVar("R_co", bound=KVRow, covariant=True)


@dataclass(frozen=True, slots=True)
class Span(Generic[R_co]):
    """The next `tokens` tokens of a row, after the `start` tokens that are computed. The row has room for them."""

    row: R_co
    start: int
    tokens: int

    @property
    def stop(self) -> int:
        """The row's computed tokens after the forward pass."""
        return self.start + self.tokens


def in_order(spans: Sequence[Span[R]]) -> list[Span[R]]:
    """Single tokens first, then short chunks, then long ones; of each kind, those that attend to few tokens first."""
    return sorted(spans, key=lambda span: (kind_of(span.tokens), span.stop))


class Forward:
    """One forward pass over rows of the pool, shared by its layers.

    `offset`: the position of each token, int32 [N].

    Args:
        spans: `in_order`.
        dense_rows: up to so many single tokens attend row by row instead of in one call, if the blocks of each row are
            consecutive. Infinite: all rows attend one by one, because the device has no `gather_mm` for their type.
    """

    def __init__(self, cache: LoRABatchedKVCache, spans: Sequence[Span[KVRow]], dense_rows: float) -> None:
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        self.offset = mx.array(positions.astype(np.int32))
        self._cache, self._spans, self._dense_rows = cache, spans, dense_rows
        self._groups: dict[int, _GroupForward | QuantizedGroupForward] = {}

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Writes the new tokens' keys and values, [N, kv_heads, 1, head_dim], into the pool."""
        group, index = self._of(layer)
        group.write(index, keys, values)

    def attend(
        self, layer: int, queries: mx.array, scale: float, sinks: mx.array | None, heads: LatentHeads | None = None
    ) -> mx.array:
        """Attention of queries [N, heads, 1, head_dim] over all written tokens of their rows, the new ones included.
        `heads`: see `AttentionCalls.attend`."""
        group, index = self._of(layer)
        return group.attend(index, queries, scale, sinks, heads)

    def _of(self, layer: int) -> tuple[_GroupForward | QuantizedGroupForward, int]:
        """The forward pass in the layer's group, made when it is first used, and the layer's number in the group."""
        number, index = self._cache.group_of[layer]
        if number not in self._groups:
            tables = [span.row.tables[number] for span in self._spans]
            group = self._cache.groups[number]
            self._groups[number] = _group_forward(self._cache, group, tables, self._spans, self._dense_rows)
        return self._groups[number], index


def _group_forward(
    cache: LoRABatchedKVCache,
    group: LayerGroup,
    tables: Sequence[Sequence[int]],
    spans: Sequence[Span[KVRow]],
    dense_rows: float,
) -> _GroupForward | QuantizedGroupForward:
    if cache.tails is None or cache.layout.bits is None:
        return _GroupForward(group, tables, spans, dense_rows)
    return QuantizedGroupForward(group, cache.tails, tables, spans, cache.layout.bits, dense_rows)


class _GroupForward:
    """The forward pass in one layer group: index arrays that its layers share."""

    def __init__(
        self,
        group: LayerGroup,
        tables: Sequence[Sequence[int]],
        spans: Sequence[Span[KVRow]],
        dense_rows: float,
    ) -> None:
        self._arena = group.arena
        self._targets = token_places(spans, tables)
        self._lines: dict[int, Lines] = {}
        rows = [seen_blocks(span, table, group.window) for span, table in zip(spans, tables, strict=True)]
        self._calls = AttentionCalls(rows, group.window, dense_rows)

    def write(self, index: int, keys: mx.array, values: mx.array) -> None:
        kv_heads = keys.shape[1]
        if kv_heads not in self._lines:
            self._lines[kv_heads] = lines_of(*self._targets, kv_heads)
        self._arena.write(index, self._lines[kv_heads], keys, values)

    def attend(
        self, index: int, queries: mx.array, scale: float, sinks: mx.array | None, heads: LatentHeads | None
    ) -> mx.array:
        return self._calls.attend(self._arena.keys[index], self._arena.values[index], queries, scale, sinks, heads)


def seen_blocks(span: Span[KVRow], table: Sequence[int], window: int | None) -> RowBlocks:
    """The blocks of a row that its span's tokens attend to."""
    first = 0 if window is None else max(0, span.start - window + 1) // BLOCK_TOKENS
    places = table[first : -(-span.stop // BLOCK_TOKENS)]
    return RowBlocks(places, first * BLOCK_TOKENS, span.start, span.tokens)


Targets = tuple[NDArray[np.int64], NDArray[np.int64]]


def token_places(spans: Sequence[Span[KVRow]], tables: Sequence[Sequence[int]]) -> Targets:
    """For each new token, the place of its block and its position in the block: both int64 [N]."""
    positions = [np.arange(span.start, span.stop) for span in spans]
    places = [
        np.asarray(table[span.start // BLOCK_TOKENS : -(-span.stop // BLOCK_TOKENS)])[
            at // BLOCK_TOKENS - span.start // BLOCK_TOKENS
        ]
        for span, table, at in zip(spans, tables, positions, strict=True)
    ]
    return np.concatenate(places), np.concatenate(positions) % BLOCK_TOKENS
