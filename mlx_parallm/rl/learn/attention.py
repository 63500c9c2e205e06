"""Attention over packed tokens (see `layout`), in one forward pass.

A branch is one attention call, and so is a bucket: each of its rows attends to the branches above it and to itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from mlx_parallm.batch.attention import additive, attention
from mlx_parallm.rl.learn.layout import Branch


@dataclass(frozen=True, slots=True)
class Window:
    """Passed to attention in place of a mask. `size`: the layer's sliding window in tokens; None: it has no window."""

    size: int | None


@dataclass(frozen=True, slots=True)
class PackedStream:
    """Layout of packed tokens, passed to the model's layers in place of KV caches. `offset`: positions, int32 [N]."""

    branches: tuple[Branch, ...]
    offset: mx.array

    @classmethod
    def of(cls, branches: Sequence[Branch]) -> PackedStream:
        return cls(tuple(branches), mx.array([at for each in branches for at in each.positions()], mx.int32))

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> Window:
        return Window(window_size)


class PackedCache:
    """Keys and values of one layer in one forward pass, and the attention over them."""

    def __init__(self, stream: PackedStream) -> None:
        self.offset = stream.offset
        self._branches = stream.branches

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Stores keys and values, [N, kv_heads, 1, head_dim], for `attend`, and returns them unchanged."""
        self._keys, self._values = keys, values
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: Window, sinks: mx.array | None) -> mx.array:
        """Attention of all tokens, [N, heads, 1, head_dim] → [N, heads, 1, head_dim of values]."""
        call = _Call(queries, self._keys, self._values, scale, mask.size, sinks)
        starts = accumulate((branch.tokens for branch in self._branches), initial=0)
        parts = [part for branch, at in zip(self._branches, starts, strict=False) for part in call.branch(branch, at)]
        return mx.concatenate(parts)


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention in one layer; arrays [N, heads, 1, head_dim]."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    window: int | None
    sinks: mx.array | None

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
        mask = _mask(offset, width, self.window, queries.dtype)
        return _tokens(attention(queries, keys, values, self.scale, mask, self.sinks)), (keys, values)


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
