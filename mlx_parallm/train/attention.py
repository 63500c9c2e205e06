"""Attention over packed tokens (see `layout`), in one forward pass.

A branch is one attention call, and so is a bucket: each of its rows attends to the branches above it and to itself. In
a pass with many scores, all calls are made in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

import mlx.core as mx

from mlx_parallm.batch.attention import additive, attention
from mlx_parallm.core.branches import Branch
from mlx_parallm.train.recomputation import Unit, watching

SCORES_AT_ONCE = 1 << 19
"""Attention scores of one head that may be in memory at a time. A pass with more is made in blocks, so that the memory
of a long row grows with its length and not with the square of it."""


def branches_at(branches: Sequence[Branch]) -> Iterator[tuple[Branch, int]]:
    """The branches, each with the index of its first token."""
    return zip(branches, accumulate((each.tokens for each in branches), initial=0), strict=False)


def attend(
    branches: Sequence[Branch],
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of all tokens, arrays [N, heads, 1, head_dim] → [N, heads, 1, head_dim of values]."""
    call = _Call(queries, keys, values, scale, window, sinks, sum(map(_scores, branches)) > SCORES_AT_ONCE)
    return mx.concatenate([part for branch, at in branches_at(branches) for part in call.branch(branch, at)])


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention in one layer; arrays [N, heads, 1, head_dim]. `large`: it is made in blocks."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    window: int | None
    sinks: mx.array | None
    large: bool

    def branch(self, branch: Branch, at: int, above: tuple[mx.array, mx.array] | None = None) -> Iterator[mx.array]:
        """The outputs of a branch, whose tokens lie from `at` on. `above`: keys and values of the branches above it."""
        if branch.length:
            output, above = self._rows_at(at, 1, branch.length, branch.start, above)
            yield output
        at += branch.length
        for bucket in branch.buckets:
            if bucket.width:
                yield self._rows_at(at, bucket.rows, bucket.width, branch.stop, above)[0]
            at += bucket.tokens
        for inner in branch.branches:
            yield from self.branch(inner, at, above)
            at += inner.tokens

    def _rows_at(
        self, at: int, rows: int, width: int, offset: int, above: tuple[mx.array, mx.array] | None
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """The outputs of rows of `width` tokens from position `offset` on, and their keys and values with those above
        them."""
        queries, *own = (_rows(each[at : at + rows * width], rows) for each in (self.queries, self.keys, self.values))
        keys, values = own if above is None else map(_join, above, own)
        attended = in_blocks(self._attend, offset) if self.large else partial(self._attend, offset)
        return _tokens(attended(queries, keys, values)), (keys, values)

    def _attend(self, offset: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """The outputs of queries at the positions from `offset` on, [rows, heads, T, head_dim]."""
        mask = _mask(offset, queries.shape[2], self.window, queries.dtype)
        return attention(queries, keys, values, self.scale, mask, self.sinks)


def _scores(branch: Branch) -> int:
    """The attention scores of one head."""
    own = branch.length * branch.stop + sum(each.tokens * (branch.stop + each.width) for each in branch.buckets)
    return own + sum(map(_scores, branch.branches))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries of some rows, and the keys that they see."""

    rows: slice
    queries: slice
    keys: slice

    def of_queries(self, queries: mx.array) -> mx.array:
        return queries[self.rows, :, self.queries]

    def of_keys(self, keys: mx.array) -> mx.array:
        return keys[self.rows, :, self.keys]


def _blocks(rows: int, tokens: int, offset: int) -> Iterator[_Block]:
    """Blocks of as many rows as have SCORES_AT_ONCE scores, or of so many queries of one row."""
    together = max(1, SCORES_AT_ONCE // (tokens * (offset + tokens)))
    size = tokens if together > 1 else max(1, SCORES_AT_ONCE // (offset + tokens))
    for row in range(0, rows, together):
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            yield _Block(slice(row, row + together), slice(start, stop), slice(0, offset + stop))


def in_blocks(attend: Callable[..., mx.array], offset: int) -> Callable[..., mx.array]:
    """Attention of the queries at the positions from `offset` on, block after block.

    The scores of a block are computed again in the backward pass, and no block begins, forward or backward, before the
    one before it has ended. So the scores of one block are in memory at a time.

    Args:
        attend: the same for a block: (position of the first query, queries, keys, values) → outputs.

    Returns:
        (queries [rows, heads, T, head_dim], keys, values [rows, kv_heads, offset + T, head_dim]) → outputs.
    """

    def forward(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        outputs = mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)
        last: list[mx.array] = []
        for block in _blocks(queries.shape[0], queries.shape[2], offset):
            (mine,) = _after([block.of_queries(queries)], last)
            last = [attend(offset + block.queries.start, mine, block.of_keys(keys), block.of_keys(values))]
            outputs[block.rows, :, block.queries] = last[0]
        return outputs

    def gradient(primals: Sequence[mx.array], cotangent: mx.array, *_: mx.array) -> tuple[mx.array, ...]:
        queries, keys, values = primals
        into_queries, into_keys, into_values = mx.zeros_like(queries), mx.zeros_like(keys), mx.zeros_like(values)
        for block in _blocks(queries.shape[0], queries.shape[2], offset):
            done = [into_queries, into_keys, into_values]
            mine, upstream = _after([block.of_queries(queries), block.of_queries(cotangent)], done)
            attend_block = partial(attend, offset + block.queries.start)
            arguments = [mine, block.of_keys(keys), block.of_keys(values)]
            of_queries, of_keys, of_values = mx.vjp(attend_block, arguments, [upstream])[1]
            into_queries[block.rows, :, block.queries] = of_queries
            into_keys = into_keys.at[block.rows, :, block.keys].add(of_keys)
            into_values = into_values.at[block.rows, :, block.keys].add(of_values)
        return into_queries, into_keys, into_values

    watch = watching()
    if watch is not None:
        return lambda *arrays: watch(
            Unit(lambda *each: [forward(*each)], arrays, lambda each, of: gradient(each, *of))
        )[0]
    attended = mx.custom_function(forward)
    attended.vjp(gradient)
    return cast(Callable[..., mx.array], attended)


def _after(arrays: list[mx.array], done: list[mx.array]) -> list[mx.array]:
    """The same arrays, which are not computed before others are."""
    return cast(list[mx.array], mx.depends(arrays, done)) if done else arrays


def _rows(tokens: mx.array, rows: int) -> mx.array:
    """[rows · T, heads, 1, head_dim] → [rows, heads, T, head_dim]."""
    _, heads, _, width = tokens.shape
    return tokens.reshape(rows, -1, heads, width).swapaxes(1, 2)


def _tokens(rows: mx.array) -> mx.array:
    """[rows, heads, T, head_dim] → [rows · T, heads, 1, head_dim]."""
    _, heads, _, width = rows.shape
    return rows.swapaxes(1, 2).reshape(-1, heads, 1, width)


def _join(above: mx.array, own: mx.array) -> mx.array:
    """Puts [1, heads, P, head_dim] before each row of [G, heads, T, head_dim]."""
    return mx.concatenate([mx.broadcast_to(above, (own.shape[0], *above.shape[1:])), own], axis=2)


def _mask(offset: int, tokens: int, window: int | None, dtype: mx.Dtype) -> mx.array:
    """Additive causal mask [T, offset + T] of T tokens from position `offset` on. A window limits how far back they
    attend."""
    queries = mx.arange(offset, offset + tokens)[:, None]
    keys = mx.arange(offset + tokens)[None]
    seen = keys <= queries
    return additive(seen if window is None else seen & (keys > queries - window), dtype)
