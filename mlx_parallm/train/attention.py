"""Attention of a pass with gradients over packed tokens (see `packing`).

    by parts    one call for each bucket, and one for each branch: their rows attend to what is above them and to
                themselves
    together    one call for all tokens, with a mask of those that belong together

A CPU pays for scores, and attends by parts. A GPU pays for calls: as long as all tokens have few scores, it attends to
them together. Those scores are never kept, and those of one layer take less than the logits of one block of positions.
Calls with many scores are made in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.attention import additive, attention
from mlx_parallm.model.device import on_cpu
from mlx_parallm.train.branches import Branch
from mlx_parallm.train.recomputation import Unit, recomputed, watching

SCORES_AT_ONCE = 1 << 19
"""Attention scores of one head that may be in memory at a time. A pass with more is made in blocks, so that the memory
of a long row grows with its length and not with the square of it."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """Rows of `width` tokens that lie one after the other: those of a bucket, or the tokens of a branch as one row.

    start: where the first row begins. offset: the position of each row's first token. above: the tokens before them,
    which all rows share; None if there are none.
    """

    start: int
    rows: int
    width: int
    offset: int
    above: PackedPart | None = None

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.width

    @property
    def scores(self) -> int:
        """Attention scores of one head."""
        return self.rows * self.width * (self.offset + self.width)


def packed_parts(branches: Sequence[Branch]) -> list[PackedPart]:
    """All tokens of the branches, in the order in which they lie."""
    found: list[PackedPart] = []

    def add(rows: int, width: int, offset: int, above: PackedPart | None) -> PackedPart | None:
        if not rows * width:
            return above
        found.append(PackedPart(found[-1].stop if found else 0, rows, width, offset, above))
        return found[-1]

    def add_branch(branch: Branch, above: PackedPart | None) -> None:
        above = add(1, branch.length, branch.start, above)
        for bucket in branch.buckets:
            add(bucket.rows, bucket.width, branch.stop, above)
        for inner in branch.branches:
            add_branch(inner, above)

    for branch in branches:
        add_branch(branch, None)
    return found


class PackedAttention:
    """The attention of one pass. Its masks are made once, and not in every layer. `parts`: see `packed_parts`."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.parts = packed_parts(branches)
        self._is_large = sum(part.scores for part in self.parts) > SCORES_AT_ONCE
        self._masks: dict[tuple[object, ...], mx.array] = {}

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of all tokens, arrays [N, heads, 1, head_dim] → [N, heads, 1, head_dim of values]."""
        if len(self.parts) > 1 and len(queries) ** 2 <= SCORES_AT_ONCE and not on_cpu():
            return self._together(queries, keys, values, scale, self._mask_of_all(window, queries.dtype), sinks)

        def attend(offset: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            """Of queries at the positions from `offset` on, [rows, heads, T, head_dim]."""
            mask = self._mask(offset, queries.shape[2], window, queries.dtype)
            return attention(queries, keys, values, scale, mask, sinks)

        outputs: list[mx.array] = []
        seen: dict[PackedPart | None, Sequence[mx.array]] = {}
        for part, *arrays in zip(self.parts, *map(self.split, (queries, keys, values)), strict=True):
            mine, *own = (_rows(each, part.rows) for each in arrays)
            seen[part] = own if part.above is None else list(map(_join, seen[part.above], own))
            attend_part = in_blocks(attend, part.offset) if self._is_large else partial(attend, part.offset)
            outputs.append(_tokens(attend_part(mine, *seen[part])))
        return mx.concatenate(outputs)

    def _together(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention in one call, whose scores are computed again in the backward pass: nearly all of them are of tokens
        that do not belong together, and would be kept in vain."""
        one_row = [each.transpose(2, 1, 0, 3) for each in (queries, keys, values)]

        def attend(others: list[mx.array], queries: mx.array) -> list[mx.array]:
            keys, values = others
            return [attention(queries, keys, values, scale, mask, sinks)]

        return recomputed(attend)(one_row[1:], one_row[0])[0].transpose(2, 1, 0, 3)

    def split(self, tokens: mx.array) -> Sequence[mx.array]:
        """What each part has of an array of all tokens, [N, ...]. The gradient is one concatenation; that of slices
        would be an array of all tokens for each of them."""
        starts = [part.start for part in self.parts[1:]]
        return list(mx.split(tokens, starts)) if starts else [tokens]

    def _mask(self, offset: int, tokens: int, window: int | None, dtype: mx.Dtype) -> mx.array:
        """The additive mask of T tokens from position `offset` on, [T, offset + T]. Those of blocks would take too much
        memory together to be kept."""
        if self._is_large:
            return additive(causal(offset, tokens, window), dtype)
        key = offset, tokens, window, dtype
        if key not in self._masks:
            self._masks[key] = additive(causal(offset, tokens, window), dtype)
        return self._masks[key]

    def _mask_of_all(self, window: int | None, dtype: mx.Dtype) -> mx.array:
        """The additive mask of all tokens, [N, N]."""
        key = window, dtype
        if key not in self._masks:
            self._masks[key] = additive(mx.array(_seen(self.parts, window)), dtype)
        return self._masks[key]


def causal(offset: int, tokens: int, window: int | None) -> mx.array:
    """The keys that T tokens from position `offset` on see, bool [T, offset + T]. A window limits how far back."""
    queries = mx.arange(offset, offset + tokens)[:, None]
    keys = mx.arange(offset + tokens)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _seen(parts: Sequence[PackedPart], window: int | None) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """The keys that each of all tokens sees, [N, N]."""
    seen = np.zeros((parts[-1].stop, parts[-1].stop), np.bool_)
    positions = np.concatenate([np.tile(np.arange(part.width) + part.offset, part.rows) for part in parts])
    for part in parts:
        for start in range(part.start, part.stop, part.width):
            row = slice(start, start + part.width)
            seen[row, row] = np.tri(part.width, dtype=np.bool_)
        above = part.above
        while above is not None:
            seen[part.start : part.stop, above.start : above.stop] = True
            above = above.above
    return seen if window is None else seen & (positions[None] > positions[:, None] - window)


# -- blocks --------------------------------------------------------------------------------------


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
        for rows, mine, seen in _blocks(queries.shape[0], queries.shape[2], offset):
            (block,) = _after([queries[rows, :, mine]], last)
            last = [attend(offset + mine.start, block, keys[rows, :, seen], values[rows, :, seen])]
            outputs[rows, :, mine] = last[0]
        return outputs

    def gradient(primals: Sequence[mx.array], cotangent: mx.array, *_: mx.array) -> tuple[mx.array, ...]:
        queries, keys, values = primals
        into_queries, into_keys, into_values = mx.zeros_like(queries), mx.zeros_like(keys), mx.zeros_like(values)
        for rows, mine, seen in _blocks(queries.shape[0], queries.shape[2], offset):
            done = [into_queries, into_keys, into_values]
            block, upstream = _after([queries[rows, :, mine], cotangent[rows, :, mine]], done)
            arguments = [block, keys[rows, :, seen], values[rows, :, seen]]
            of_queries, of_keys, of_values = mx.vjp(partial(attend, offset + mine.start), arguments, [upstream])[1]
            into_queries[rows, :, mine] = of_queries
            into_keys = into_keys.at[rows, :, seen].add(of_keys)
            into_values = into_values.at[rows, :, seen].add(of_values)
        return into_queries, into_keys, into_values

    watch = watching()
    if watch is not None:
        return lambda *arrays: watch(
            Unit(lambda *each: [forward(*each)], arrays, lambda each, of: gradient(each, *of))
        )[0]
    attended = mx.custom_function(forward)
    attended.vjp(gradient)
    return cast(Callable[..., mx.array], attended)


def _blocks(rows: int, tokens: int, offset: int) -> Iterator[tuple[slice, slice, slice]]:
    """Blocks of as many rows as have SCORES_AT_ONCE scores, or of so many queries of one row: the rows, their queries,
    and the keys that these see."""
    together = max(1, SCORES_AT_ONCE // (tokens * (offset + tokens)))
    size = tokens if together > 1 else max(1, SCORES_AT_ONCE // (offset + tokens))
    for row in range(0, rows, together):
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            yield slice(row, row + together), slice(start, stop), slice(0, offset + stop)


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
