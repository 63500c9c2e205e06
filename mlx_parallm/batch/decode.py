"""The decode forward pass: one token for each of n rows.

Rows are in pool order, so rows that are adjacent in a slab form a run, and each run needs one attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import mlx.core as mx

from mlx_parallm.batch.attention import additive, attention
from mlx_parallm.batch.slab import KVRow, Slab


@dataclass(slots=True, eq=False)
class _RowRun:
    """Adjacent rows of one slab: the batch's rows [start, stop) are in the places [place, place + stop - start).

    `lengths`: tokens of each row, including the new one. `masks`: by first key and window.
    """

    slab: Slab
    place: int
    start: int
    lengths: list[int]
    masks: dict[tuple[int, int | None], mx.array | None] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def attend(
        self, layer: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        first = 0 if window is None else max(0, min(self.lengths) - window)
        keys, values = self.span(layer, first)
        return attention(queries, keys, values, scale, self._mask(first, window), sinks)

    def span(self, layer: int, first: int = 0) -> tuple[mx.array, mx.array]:
        rows = slice(self.place, self.place + len(self.lengths))
        return self.slab.span(layer, rows, slice(first, self.longest))

    def _mask(self, first: int, window: int | None) -> mx.array | None:
        """Additive [n, 1, 1, S], made once per step. None if every row sees every key of the span."""
        key = (first, window)
        if key not in self.masks:
            spans = {length - first for length in self.lengths}
            sees_all = len(spans) == 1 and (window is None or spans.pop() <= window)
            self.masks[key] = None if sees_all else self._additive(first, window)
        return self.masks[key]

    def _additive(self, first: int, window: int | None) -> mx.array:
        return additive(_visible(self.lengths, first, self.longest, window), self.slab.layout.dtype)


class DecodeForward:
    """One token for each of n rows. The rows are in pool order and have room for the token."""

    def __init__(self, rows: Sequence[KVRow]) -> None:
        self._lengths = [row.length + 1 for row in rows]
        self.offset: int | mx.array = mx.array([row.length for row in rows], dtype=mx.int32)
        self._layout = rows[0].slab.layout
        self._runs = _runs(rows)
        self._writes = _writes(rows)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        for write in self._writes:
            lines = write.lines(self._layout.layers[layer].kv_heads)
            write.slab.write(layer, lines, keys[write.batch], values[write.batch])

    def attend(
        self, layer: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        if len(self._runs) == 1:
            return self._runs[0].attend(layer, queries, scale, window, sinks)
        return mx.concatenate(
            [run.attend(layer, queries[run.start : run.stop], scale, window, sinks) for run in self._runs]
        )

    def fetch(self, layer: int) -> tuple[mx.array, mx.array]:
        """Dense copies [n, kv_heads, longest, head_dim]. `dense_mask` hides what is beyond a row's length."""
        longest = max(self._lengths)
        spans = [run.span(layer) for run in self._runs]
        keys = mx.concatenate([_pad(keys, longest) for keys, _ in spans])
        return keys, mx.concatenate([_pad(values, longest) for _, values in spans])

    def dense_mask(self, window: int | None) -> mx.array:
        return _visible(self._lengths, 0, max(self._lengths), window)


class _SlabWrite:
    """One step's write into one slab. `batch` selects the batch's rows that are in it. Indices are computed once."""

    def __init__(self, slab: Slab, rows: Sequence[KVRow], start: int, total: int) -> None:
        self.slab = slab
        self.batch = slice(start, start + len(rows)) if len(rows) < total else ...
        self._rows = rows
        self._lines: dict[int, mx.array] = {}

    def lines(self, kv_heads: int) -> mx.array:
        if kv_heads not in self._lines:
            self._lines[kv_heads] = self.slab.lines(self._rows, kv_heads)
        return self._lines[kv_heads]


def _writes(rows: Sequence[KVRow]) -> list[_SlabWrite]:
    groups = [list(group) for _, group in groupby(rows, key=lambda row: id(row.slab))]
    starts = accumulate((len(group) for group in groups), initial=0)
    return [_SlabWrite(group[0].slab, group, start, len(rows)) for group, start in zip(groups, starts, strict=False)]


def _runs(rows: Sequence[KVRow]) -> list[_RowRun]:
    runs: list[_RowRun] = []
    for start, row in enumerate(rows):
        last = runs[-1] if runs else None
        if last is not None and last.slab is row.slab and last.place + len(last.lengths) == row.index:
            last.lengths.append(row.length + 1)
        else:
            runs.append(_RowRun(row.slab, row.index, start, [row.length + 1]))
    return runs


def _visible(lengths: list[int], first: int, longest: int, window: int | None) -> mx.array:
    """Boolean [n, 1, 1, longest - first]: true for keys below each row's length and inside its window."""
    ends = mx.array(lengths)[:, None]
    keys = mx.arange(first, longest)[None]
    seen = keys < ends
    if window is not None:
        seen = seen & (keys >= ends - window)
    return seen[:, None, None]


def _pad(array: mx.array, tokens: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, tokens - array.shape[2]), (0, 0)])
