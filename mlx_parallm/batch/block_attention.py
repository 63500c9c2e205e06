"""Attention of many rows over their blocks, without copying keys or values and wherever the blocks lie.

Each pair of a row and one of its blocks is one element of a batched product: `gather_mm` reads the pair's queries and
its block in place. A pair gives the block's largest score, its sum of exponentials and its weighted values. These are
merged per row, which is exact (split-KV attention, as in Flash-Decoding, Dao et al. 2023):

    pairs (row, block)    (0, 7) (0, 2) (0, 5)   (1, 3) (1, 7)      P = 5; two rows may share a block
    scores                [P, kv_heads, group, w, 64]               w = most tokens of a row, 1 in a decode step
    peaks, sums, values   [P, kv_heads, group, w, 1 | 1 | head_dim]
    merged                [n, kv_heads, group, w, head_dim]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.kv.arena import Arena
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS
from mlx_parallm.batch.rowwise import exp
from mlx_parallm.model.device import on_cpu

_HIDDEN = -1e30
"""Score of a key that a query does not see. It is finite, so that a block without visible keys gives no NaN."""


def pairs_work(dtype: mx.Dtype) -> bool:
    """Whether `gather_mm` multiplies keys and values of this type on this device."""
    return not on_cpu() or dtype == mx.float32


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The tokens of one row in a forward pass, and the blocks that they attend to.

    places: the blocks, in the row's order
    first: the position of the first token in these blocks
    start: the position of the row's first new token. A token sees the positions up to its own.
    tokens: the number of new tokens
    """

    places: Sequence[int]
    first: int
    start: int
    tokens: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.tokens


class BlockPairs:
    """The pairs of one forward pass in one layer group, as index arrays that all its layers share.

    Args:
        rows: if their numbers of new tokens differ, the shorter ones are padded.
        window: a token sees the last `window` positions, its own included; None for all.
    """

    def __init__(self, rows: Sequence[RowBlocks], window: int | None) -> None:
        counts = np.array([len(row.places) for row in rows])
        self._rows, self._width = len(rows), max(row.tokens for row in rows)
        self._places = np.concatenate([np.asarray(row.places, np.int64) for row in rows])
        self._row_of_pair = np.repeat(np.arange(len(rows)), counts)
        self._hidden = mx.array(_hidden(rows, self._row_of_pair, counts, self._width, window))
        self._padding = _padding(rows, self._width)
        self._table = _merge_table(counts)
        self._indices: dict[tuple[int, int], tuple[mx.array, mx.array, mx.array]] = {}

    def attend(
        self, arena: Arena, layer: int, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """softmax(scale · Q Kᵀ) V over each row's blocks.

        Args:
            queries: [N, heads, 1, head_dim], the tokens of all rows in order.
            sinks: one logit per head that takes part in the softmax but has no value (gpt-oss), or None.

        Returns:
            [N, heads, 1, head_dim of values], in the queries' dtype.
        """
        keys, values = arena.keys[layer], arena.values[layer]
        kv_heads, places, block, width = keys.shape
        query_of, block_of, every = self._indices_for(kv_heads, places)
        grouped = self._by_head(queries * scale, kv_heads)
        blocks = keys.reshape(-1, block, width).swapaxes(-1, -2)
        scores = mx.gather_mm(grouped, blocks, lhs_indices=query_of, rhs_indices=block_of).astype(mx.float32)
        scores = scores.reshape(len(self._places), kv_heads, -1, self._width, block) + self._hidden
        peaks = scores.max(-1, keepdims=True)
        weights = exp(scores - peaks)
        weighted = mx.gather_mm(
            weights.reshape(len(block_of), -1, block).astype(values.dtype),
            values.reshape(-1, block, values.shape[-1]),
            lhs_indices=every,
            rhs_indices=block_of,
        ).reshape(*weights.shape[:-1], -1)
        return self._by_token(self._merge(peaks, weights.sum(-1, keepdims=True), weighted, sinks))

    def _by_head(self, queries: mx.array, kv_heads: int) -> mx.array:
        """[N, heads, 1, head_dim] → [n * kv_heads, group * w, head_dim]."""
        width = queries.shape[-1]
        if self._padding is None:
            return queries.reshape(self._rows * kv_heads, -1, width)
        padded = queries[self._padding[0]]  # [n, w, heads, 1, head_dim]
        return padded.transpose(0, 2, 3, 1, 4).reshape(self._rows * kv_heads, -1, width)

    def _by_token(self, merged: mx.array) -> mx.array:
        """[n, kv_heads, group, w, head_dim] → [N, heads, 1, head_dim]."""
        rows, width = self._rows, merged.shape[-1]
        if self._padding is None:
            return merged.reshape(rows, -1, 1, width)
        tokens = merged.reshape(rows, -1, self._width, width).swapaxes(1, 2).flatten(0, 1)
        return tokens[self._padding[1]][:, :, None]

    def _merge(self, peaks: mx.array, sums: mx.array, weighted: mx.array, sinks: mx.array | None) -> mx.array:
        """Combines the pairs of each row: [P, kv_heads, group, w, …] → [n, kv_heads, group, w, head_dim].

        Peaks and sums are fp32. The last sum over a row's blocks is a product, which reads `weighted` once.
        """
        peaks, sums, weighted = self._by_row(peaks, _HIDDEN), self._by_row(sums, 0.0), self._by_row(weighted, 0.0)
        peak = peaks.max(1, keepdims=True)
        if sinks is not None:
            sinks = sinks.astype(mx.float32).reshape(1, 1, *peak.shape[2:4], 1, 1)
            peak = mx.maximum(peak, sinks)
        shares = exp(peaks - peak)
        mass = (shares * sums).sum(1, keepdims=True)
        if sinks is not None:
            mass = mass + exp(sinks - peak)
        shares = mx.moveaxis(shares / mass, 1, -1).astype(weighted.dtype)  # [n, kv_heads, group, w, 1, blocks]
        return (shares @ mx.moveaxis(weighted, 1, -2)).squeeze(-2)

    def _by_row(self, pairs: mx.array, fill: float) -> mx.array:
        """[P, …] → [n, most blocks of a row, …]; rows with fewer blocks are filled."""
        if self._table is None:
            return pairs.reshape(self._rows, -1, *pairs.shape[1:])
        return mx.concatenate([pairs, mx.full((1, *pairs.shape[1:]), fill, pairs.dtype)])[self._table]

    def _indices_for(self, kv_heads: int, places: int) -> tuple[mx.array, mx.array, mx.array]:
        """For each pair and head, the index of its queries in [n * kv_heads], of its block in [kv_heads * places], and
        its own; all uint32 [P * kv_heads]."""
        key = (kv_heads, places)
        if key not in self._indices:
            heads = np.arange(kv_heads)[None]
            query_of = self._row_of_pair[:, None] * kv_heads + heads
            block_of = self._places[:, None] + heads * places
            every = np.arange(query_of.size)
            self._indices[key] = (_uint32(query_of.ravel()), _uint32(block_of.ravel()), _uint32(every))
        return self._indices[key]


def _hidden(
    rows: Sequence[RowBlocks],
    row_of_pair: NDArray[np.int64],
    counts: NDArray[np.int64],
    width: int,
    window: int | None,
) -> NDArray[np.float32]:
    """Added to the scores, fp32 [P, 1, 1, w, 64]: 0 for visible keys and a very low number for the others."""
    block_of_row = np.arange(len(row_of_pair)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.array([row.first for row in rows])[row_of_pair] + block_of_row * BLOCK_TOKENS
    keys = first[:, None, None] + np.arange(BLOCK_TOKENS)
    position = np.array([row.start for row in rows])[row_of_pair, None, None] + np.arange(width)[:, None]
    seen = keys <= position
    if window is not None:
        seen &= keys > position - window
    return np.where(seen, np.float32(0), np.float32(_HIDDEN))[:, None, None]


def _padding(rows: Sequence[RowBlocks], width: int) -> tuple[mx.array, mx.array] | None:
    """The token of each place, [n, w], and the place of each token, [N]. None if every row has one token.

    Places that a row does not need repeat its first token.
    """
    if width == 1:
        return None
    tokens = np.array([row.tokens for row in rows])
    real = np.arange(width) < tokens[:, None]
    numbers = (np.cumsum(tokens) - tokens)[:, None] + np.where(real, np.arange(width), 0)
    return _uint32(numbers), _uint32(np.flatnonzero(real))


def _merge_table(counts: NDArray[np.int64]) -> mx.array | None:
    """int32 [n, most blocks of a row]: the pairs of each row, and P where it has no more. None if all have as many."""
    most = counts.max()
    if (counts == most).all():
        return None
    numbers = (np.cumsum(counts) - counts)[:, None] + np.arange(most)
    return mx.array(np.where(np.arange(most) < counts[:, None], numbers, counts.sum()).astype(np.int32))


def _uint32(indices: NDArray[np.int64]) -> mx.array:
    return mx.array(indices.astype(np.uint32))
