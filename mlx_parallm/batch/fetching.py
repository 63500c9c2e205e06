"""A forward pass for models that compute attention in their own code: it copies every row's keys and values out.

Such a model takes either one token of each of n rows, or T tokens of one row:

    single tokens   [n, 1]   offset [n]
    one chunk       [1, T]   integer offset
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.forward import Span, token_places
from mlx_parallm.batch.kv.arena import lines
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS, blocks_for
from mlx_parallm.batch.kv.cache import KVRow, LoRABatchedKVCache


class FetchingForward:
    """One forward pass over rows of the pool, shared by its layers.

    `offset`: the position of the first new token of each row.

    Args:
        spans: one token of each row, or one span.

    Raises:
        ValueError: several spans of which one has several tokens.
    """

    def __init__(self, cache: LoRABatchedKVCache, spans: Sequence[Span[KVRow]]) -> None:
        if len(spans) > 1 and any(span.tokens > 1 for span in spans):
            raise ValueError("a model that computes attention itself takes one chunk at a time")
        starts = [span.start for span in spans]
        self.offset: int | mx.array = starts[0] if len(spans) == 1 else mx.array(starts, dtype=mx.int32)
        self._spans = tuple(spans)
        self._tokens = spans[0].tokens
        self._longest = max(span.stop for span in spans)
        self._groups = cache.groups
        tables = [[span.row.tables[number] for span in spans] for number in range(len(cache.groups))]
        self._targets = [token_places(spans, each) for each in tables]
        self._tables = [_padded(each, blocks_for(self._longest)) for each in tables]
        self._of_layer = {
            layer: (number, index)
            for number, group in enumerate(cache.groups)
            for index, layer in enumerate(group.layers)
        }

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Writes keys and values [B, kv_heads, T, head_dim] into the pool."""
        number, index = self._of_layer[layer]
        arena, kv_heads = self._groups[number].arena, keys.shape[1]
        at = lines(*self._targets[number], kv_heads, arena.places(index))
        arena.write(index, at, _by_token(keys), _by_token(values))

    def fetch(self, layer: int) -> tuple[mx.array, mx.array]:
        """Dense copies [B, kv_heads, longest, head_dim]. `dense_mask` hides what is beyond a row's length."""
        number, index = self._of_layer[layer]
        arena, table = self._groups[number].arena, self._tables[number]
        return self._copied(arena.keys[index], table), self._copied(arena.values[index], table)

    def dense_mask(self, window: int | None) -> mx.array:
        """Boolean [B, 1, T, S], true where a query may attend to a key that `fetch` returns."""
        starts = mx.array([span.start for span in self._spans])[:, None, None]
        queries = starts + mx.arange(self._tokens)[None, :, None]
        keys = mx.arange(self._longest)[None, None]
        return ((keys <= queries) & (queries < keys + (window or self._longest)))[:, None]

    def _copied(self, array: mx.array, table: NDArray[np.int64]) -> mx.array:
        kv_heads, places, _, width = array.shape
        blocks = mx.array(table[:, None] + np.arange(kv_heads)[:, None] * places)
        dense = array.reshape(-1, BLOCK_TOKENS, width)[blocks]
        return dense.reshape(len(table), kv_heads, -1, width)[:, :, : self._longest]


def _padded(tables: Sequence[Sequence[int]], blocks: int) -> NDArray[np.int64]:
    """The first places of each row, [rows, blocks]. Place 0 fills up short rows, and stands for freed blocks."""
    padded = np.zeros((len(tables), blocks), np.int64)
    for row, table in zip(padded, tables, strict=True):
        own = table[:blocks]
        row[: len(own)] = np.maximum(own, 0)
    return padded


def _by_token(tokens: mx.array) -> mx.array:
    """[B, heads, T, head_dim] → [B · T, heads, 1, head_dim]."""
    return tokens.transpose(0, 2, 1, 3).reshape(-1, tokens.shape[1], 1, tokens.shape[3])
