"""The three forward passes over rows of the KV pool: one row's next tokens, several rows' packed, and a decode step.

Rows of a decode step are in pool order. Rows that are adjacent in a slab form a run, which needs one attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import mlx.core as mx

from mlx_parallm.batch.attention import additive, attention, needs_array_mask
from mlx_parallm.batch.slab import KVRow, Slab

# ---- prefill -----------------------------------------------------------------------------------


class PrefillForward:
    """T more tokens of one row, starting at its length."""

    def __init__(self, row: KVRow, tokens: int) -> None:
        self.offset: int | mx.array = row.length
        self.tokens = tokens
        self._row = row
        self._start = row.length
        self._stop = row.length + tokens
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    def positions(self) -> mx.array:
        """The positions of the new tokens, int32 [T]."""
        return mx.arange(self._start, self._stop, dtype=mx.int32)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._row.slab.write_span(layer, self._row.index, self._start, keys, values)

    def attend(
        self, layer: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """Causal attention. With a sliding window, only the keys inside it are read."""
        first = 0 if window is None else max(0, self._start - window + 1)
        keys, values = self._span(layer, first)
        return attention(queries, keys, values, scale, self._mask(first, window), sinks)

    def fetch(self, layer: int) -> tuple[mx.array, mx.array]:
        return self._span(layer, 0)

    def dense_mask(self, window: int | None) -> mx.array:
        """Boolean [1, 1, T, S], true where a query may attend."""
        return self._band(0, window or self._stop)[None, None]

    def _span(self, layer: int, first: int) -> tuple[mx.array, mx.array]:
        index = self._row.index
        return self._row.slab.span(layer, slice(index, index + 1), slice(first, self._stop))

    def _mask(self, first: int, window: int | None) -> mx.array | str | None:
        """The mask for `attention`: additive [T, S], made once per forward pass, or "causal" if that is enough."""
        banded = window is not None and self._stop - first > window
        if not banded and not needs_array_mask():
            return "causal"
        if self.tokens == 1 and not banded:
            return None
        key = (first, window)
        if key not in self._masks:
            self._masks[key] = additive(self._band(first, window or self._stop), self._row.slab.layout.dtype)
        return self._masks[key]

    def _band(self, first: int, window: int) -> mx.array:
        """Boolean [T, S]: query q sees key k if q - window < k <= q."""
        queries = mx.arange(self._start, self._stop)[:, None]
        keys = mx.arange(first, self._stop)[None]
        return (keys <= queries) & (queries < keys + window)


class PackedPrefillForward:
    """Chunks of several rows in one forward pass. The model sees a batch of single tokens, each at its own offset."""

    def __init__(self, parts: Sequence[PrefillForward]) -> None:
        ends = list(accumulate(part.tokens for part in parts))
        self._parts = [(slice(end - part.tokens, end), part) for part, end in zip(parts, ends, strict=True)]
        self.offset: int | mx.array = mx.concatenate([part.positions() for part in parts])

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        for tokens, part in self._parts:
            part.write(layer, _as_row(keys[tokens]), _as_row(values[tokens]))

    def attend(
        self, layer: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        outputs = [part.attend(layer, _as_row(queries[tokens]), scale, window, sinks) for tokens, part in self._parts]
        return mx.concatenate([output.transpose(2, 1, 0, 3) for output in outputs])

    def fetch(self, layer: int) -> tuple[mx.array, mx.array]:
        raise TypeError("a model that computes attention itself takes one row at a time")

    def dense_mask(self, window: int | None) -> mx.array:
        raise TypeError("a model that computes attention itself takes one row at a time")


def _as_row(tokens: mx.array) -> mx.array:
    """[T, heads, 1, head_dim], a batch of tokens → [1, heads, T, head_dim], one row."""
    return tokens.transpose(2, 1, 0, 3)


# ---- decode ------------------------------------------------------------------------------------


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
