"""Attention of many rows over their blocks, without copying keys or values and wherever the blocks lie.

Each pair of a fold (tokens that attend to the same blocks, see `folds`) and one of its blocks is one element of a
batched product: `gather_mm` reads the pair's queries and its block in place. The scores, which are small beside the
keys, are then put in the order of the tokens, so that one softmax covers all blocks of a token:

    pairs      (fold, block)   (0, 7) (0, 2) (0, 5)   (1, 3) (1, 1)      P = 5, w tokens in each fold
    products   queries of the fold x keys of the block                   [P, kv_heads, w * group, 64]
    scores     put in order, and a mask added                            [N, heads, most blocks of a token * 64]
    weights    softmax
    outputs    weights of the pair x values of the block, summed up      [P, kv_heads, w * group, head_dim]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.folds import Folds, Indices, RowBlocks, folds_of
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS
from mlx_parallm.batch.rowwise import exp
from mlx_parallm.model.device import on_cpu

_WORTH_A_CALL, _WORTH_A_CALL_ON_CPU = 512, 16
"""A call must save the scores of at least so many padded blocks."""


def pairs_work(dtype: mx.Dtype) -> bool:
    """Whether `gather_mm` multiplies keys and values of this type on this device."""
    return not on_cpu() or dtype == mx.float32


def folds_work() -> bool:
    """Whether one product may have many queries. With MLX 0.32 on CUDA, `gather_mm` fails above 64."""
    return not mx.cuda.is_available()


def calls(rows: Sequence[RowBlocks]) -> list[Sequence[RowBlocks]]:
    """Splits rows, the shortest first, into calls where the padding of short rows would cost more than a call does."""
    if len(rows) == 1:
        return [rows]
    counts = np.array([len(row.places) for row in rows])
    below, above = np.maximum.accumulate(counts)[:-1], np.maximum.accumulate(counts[::-1])[::-1][1:]
    left = np.arange(1, len(rows))
    saved = (counts.max() - below) * left + (counts.max() - above) * (len(rows) - left)
    best = int(saved.argmax())
    if saved[best] < (_WORTH_A_CALL_ON_CPU if on_cpu() else _WORTH_A_CALL):
        return [rows]
    return [*calls(rows[: best + 1]), *calls(rows[best + 1 :])]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the index arrays of a layer depend on. `places`: in the layer's arrays."""

    kv_heads: int
    group: int
    places: int
    dtype: mx.Dtype


class BlockPairs:
    """The pairs of one forward pass in one layer group, as index arrays that all its layers share.

    Args:
        rows: if their numbers of new tokens differ, the shorter ones are padded, and so are rows with fewer blocks.
        window: a token sees the last `window` positions, its own included; None for all.
    """

    def __init__(self, rows: Sequence[RowBlocks], window: int | None) -> None:
        self._folds = folds_of(rows, folds_work())
        self._sharing = [_uint32(folds.tokens.ravel()) for folds in self._folds[1:]]
        self._tokens = sum(row.tokens for row in rows)
        self._first = np.repeat([row.first // BLOCK_TOKENS for row in rows], [row.tokens for row in rows])
        self._position = np.concatenate([np.arange(row.start, row.stop) for row in rows])
        self._blocks = max(len(row.places) for row in rows)
        self._window = window
        real = np.arange(self._folds[0].width) < np.array([[row.tokens] for row in rows])
        self._real = None if real.all() else _uint32(np.flatnonzero(real))
        self._made: dict[_Shape, tuple[mx.array, mx.array, list[_Products]]] = {}

    def attend(
        self, keys: mx.array, values: mx.array, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """softmax(scale · Q Kᵀ) V over each row's blocks.

        Args:
            keys, values: of all blocks, [kv_heads, places, 64, head_dim].
            queries: [N, heads, 1, head_dim], the tokens of all rows in order.
            sinks: one logit per head that takes part in the softmax but has no value (gpt-oss), or None.

        Returns:
            [N, heads, 1, head_dim of values], in the queries' dtype.
        """
        kv_heads, places = keys.shape[:2]
        lines, hidden, products = self._indices(_Shape(kv_heads, queries.shape[1] // kv_heads, places, queries.dtype))
        queries = queries * scale
        found = [each.scores(queries, keys) for each in products]
        scores = (found[0] if len(found) == 1 else mx.concatenate(found))[lines].flatten(2) + hidden
        weights = _softmax(scores, sinks).reshape(*lines.shape, BLOCK_TOKENS)
        outputs = products[0].outputs(weights, values)
        if self._real is not None:
            outputs = outputs[self._real]
        for each, tokens in zip(products[1:], self._sharing, strict=True):
            outputs = outputs.at[tokens].add(each.outputs(weights, values))
        return outputs[:, :, None]

    def _indices(self, shape: _Shape) -> tuple[mx.array, mx.array, list[_Products]]:
        if shape not in self._made:
            columns = [folds.block[:, None] - self._first[folds.tokens[folds.fold]] for folds in self._folds]
            lines = self._lines(shape, columns)
            products = [
                _Products(folds, each, self._blocks, shape) for folds, each in zip(self._folds, columns, strict=True)
            ]
            self._made[shape] = lines, self._hidden(shape.dtype), products
        return self._made[shape]

    def _lines(self, shape: _Shape, columns: Sequence[Indices]) -> mx.array:
        """For each token, head and block, the line of its 64 scores among those of all pairs: [N, heads, blocks].

        Tokens with fewer blocks repeat one of their own lines, which is hidden. A line of another row would not do,
        because it may hold a NaN.
        """
        start = np.full((self._tokens, self._blocks), -1, np.int64)
        step = np.zeros_like(start)
        base = 0
        for folds, column in zip(self._folds, columns, strict=True):
            lines = folds.width * shape.group
            tokens = folds.tokens[folds.fold]
            pairs = base + np.arange(folds.pairs)[:, None] * shape.kv_heads * lines
            start[tokens, column] = pairs + np.arange(folds.width) * shape.group
            step[tokens, column] = lines
            base += folds.pairs * shape.kv_heads * lines
        start, step = (np.where(start < 0, each[:, :1], each)[:, None, None] for each in (start, step))
        heads, group = mx.arange(shape.kv_heads)[:, None, None], mx.arange(shape.group)[:, None]
        return (_uint32(start) + heads * _uint32(step) + group).flatten(1, 2)

    def _hidden(self, dtype: mx.Dtype) -> mx.array:
        """Added to the scores, [N, 1, blocks * 64]: 0 for the keys that a token sees, and -inf for the others."""
        keys = mx.array(self._first * BLOCK_TOKENS)[:, None] + mx.arange(self._blocks * BLOCK_TOKENS)
        position = mx.array(self._position)[:, None]
        seen = keys <= position
        if self._window is not None:
            seen = seen & (keys > position - self._window)
        return mx.where(seen, 0.0, -mx.inf).astype(dtype)[:, None]


class _Products:
    """The two products of pairs whose folds have equally many tokens, in layers of one shape.

    Args:
        columns: for each pair and token of its fold, the block's number among those of the token.
        blocks: the most blocks of a token.
    """

    def __init__(self, folds: Folds, columns: Indices, blocks: int, shape: _Shape) -> None:
        heads = np.arange(shape.kv_heads)
        self._shape, self._width = shape, folds.width
        self._query_of = _uint32(folds.fold[:, None] * shape.kv_heads + heads)
        self._block_of = _uint32(folds.place[:, None] + heads * shape.places)
        self._sum = _Sum(folds, shape.dtype)
        if folds.width == 1:
            tokens = folds.tokens[folds.fold]
            self._weights_of = _uint32((tokens * shape.kv_heads + heads) * blocks + columns)
            return
        self._queries = _uint32(folds.tokens[:, None] * shape.kv_heads + heads[:, None])  # [folds, kv_heads, w]
        matrices = mx.array(folds.tokens[folds.fold])[:, None] * shape.kv_heads + mx.arange(shape.kv_heads)[:, None]
        lines = (matrices[..., None] * shape.group + mx.arange(shape.group)) * blocks
        self._weights_of = (lines + mx.array(columns)[:, None, :, None]).astype(mx.uint32).flatten(2)

    def scores(self, queries: mx.array, keys: mx.array) -> mx.array:
        """[N, heads, 1, head_dim] → [P * kv_heads * w * group, 64]."""
        width = queries.shape[-1]
        if self._width > 1:
            queries = queries.reshape(-1, self._shape.group * width)[self._queries]
        matrices = queries.reshape(-1, self._width * self._shape.group, width)
        blocks = keys.reshape(-1, BLOCK_TOKENS, width).swapaxes(-1, -2)
        products = mx.gather_mm(matrices, blocks, lhs_indices=self._query_of, rhs_indices=self._block_of)
        return products.reshape(-1, BLOCK_TOKENS)

    def outputs(self, weights: mx.array, values: mx.array) -> mx.array:
        """[N, heads, blocks, 64] → [folds * w, heads, head_dim]."""
        kv_heads, group, blocks = self._shape.kv_heads, self._shape.group, values.reshape(-1, *values.shape[2:])
        if self._width == 1:
            matrices = weights.reshape(-1, kv_heads, group, *weights.shape[2:]).swapaxes(2, 3)
            products = mx.gather_mm(matrices, blocks, lhs_indices=self._weights_of, rhs_indices=self._block_of)
        else:
            matrices = weights.reshape(-1, BLOCK_TOKENS)[self._weights_of]
            products = mx.gather_mm(matrices, blocks, rhs_indices=self._block_of)
        summed = self._sum(products).reshape(-1, kv_heads, self._width, group, values.shape[-1])
        return summed.swapaxes(1, 2).flatten(0, 1).flatten(1, 2)


class _Sum:
    """Adds up the pairs of each fold: [P, …] → [folds, …]. A NaN in the pairs of one fold does not reach another."""

    def __init__(self, folds: Folds, dtype: mx.Dtype) -> None:
        counts = np.bincount(folds.fold)
        most = int(counts.max())
        real = np.arange(most) < counts[:, None]
        self._ones = mx.array(real[:, None]).astype(dtype)  # [folds, 1, most pairs of a fold]
        first = np.cumsum(counts) - counts
        self._table = None if real.all() else _uint32(first[:, None] + np.where(real, np.arange(most), 0))

    def __call__(self, products: mx.array) -> mx.array:
        folds, _, most = self._ones.shape
        if most == 1:
            return products
        table = products if self._table is None else products[self._table]
        return self._ones @ table.reshape(folds, most, -1)


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Softmax over the last axis of [N, heads, keys]. A sink takes part in it and is then left out."""
    if sinks is not None:
        shape = (*scores.shape[:-1], 1)
        sink = mx.broadcast_to(sinks.astype(scores.dtype)[:, None], shape)
        return _softmax(mx.concatenate([scores, sink], axis=-1), None)[..., :-1]
    if not on_cpu():
        return mx.softmax(scores, axis=-1, precise=True)
    weights = exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _uint32(indices: Indices) -> mx.array:
    return mx.array(indices.astype(np.uint32))
