"""What one forward sees of the pool: a cache object per layer, in the shape that mlx-lm's model files expect.

A model file calls, per layer: `cache.offset` (RoPE positions), `cache.make_mask(...)`,
`cache.update_and_fetch(k, v)`, and then attention. With the hook installed attention comes back to
`attend`, which reads the pool in place. Without it (`fetching`), `update_and_fetch` returns dense
copies and `make_mask` a real mask, and the model attends by itself.

Three kinds of forward:

    prefill   one row, T tokens            [1, T]   integer offset, causal
    packed    T tokens of several rows     [T, 1]   offset [T]; each row attends to its own tokens only
    decode    n rows, one token each       [n, 1]   offset [n]; rows in pool order, so rows that are
                                                    adjacent in a slab form a run = one attention call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Protocol

import mlx.core as mx

from mlx_parallm.batch.attention import additive, attention, needs_array_mask
from mlx_parallm.batch.slab import KVRow, Slab


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """What `make_mask` hands through the model to `attend`: which window the model asked for."""

    window: int | None


class Forward(Protocol):
    """One forward's side of the pool, shared by its layers."""

    offset: int | mx.array

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None: ...

    def attend(
        self, layer: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array: ...

    def fetch(self, layer: int) -> tuple[mx.array, mx.array]: ...

    def dense_mask(self, window: int | None) -> mx.array: ...


class LayerCache:
    """The cache object of one layer for one forward."""

    def __init__(self, forward: Forward, layer: int) -> None:
        self._forward = forward
        self._layer = layer

    @property
    def offset(self) -> int | mx.array:
        return self._forward.offset

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> AttentionMask:
        return AttentionMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes keys/values [B, kv_heads, T, head_dim]; returns them as they came: `attend` reads the pool."""
        self._forward.write(self._layer, keys, values)
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        """Attention of queries [B, heads, T, head_dim] over all that is written, the new tokens included."""
        if not isinstance(mask, AttentionMask):
            raise TypeError("the model makes its own attention mask; it cannot be batched")
        return self._forward.attend(self._layer, queries, scale, mask.window, sinks)


class FetchingLayerCache:
    """The same for a model that attends by itself. `grouped`: its scores are [B, kv_heads, group, T, S]."""

    def __init__(self, forward: Forward, layer: int, grouped: bool) -> None:
        self._forward = forward
        self._layer = layer
        self._grouped = grouped

    @property
    def offset(self) -> int | mx.array:
        return self._forward.offset

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        mask = self._forward.dense_mask(window_size)
        return mx.expand_dims(mask, 1) if self._grouped else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._forward.write(self._layer, keys, values)
        return self._forward.fetch(self._layer)


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
        """Of the new tokens, int32 [T]."""
        return mx.arange(self._start, self._stop, dtype=mx.int32)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._row.slab.write_span(layer, self._row.index, self._start, keys, values)

    def attend(
        self, layer: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """The causal triangle; a sliding window also bounds what is read."""
        first = 0 if window is None else max(0, self._start - window + 1)
        keys, values = self._span(layer, first)
        return attention(queries, keys, values, scale, self._mask(first, window), sinks)

    def fetch(self, layer: int) -> tuple[mx.array, mx.array]:
        return self._span(layer, 0)

    def dense_mask(self, window: int | None) -> mx.array:
        """Boolean [1, 1, T, S], true where a query may look."""
        return self._band(0, window or self._stop)[None, None]

    def _span(self, layer: int, first: int) -> tuple[mx.array, mx.array]:
        index = self._row.index
        return self._row.slab.span(layer, slice(index, index + 1), slice(first, self._stop))

    def _mask(self, first: int, window: int | None) -> mx.array | str | None:
        """Additive [T, S], made once a forward; or the name of the plain triangle."""
        banded = window is not None and self._stop - first > window
        if not banded and not needs_array_mask():
            return "causal"
        if self.tokens == 1 and not banded:
            return None
        key = (first, window)
        if key not in self._masks:
            self._masks[key] = additive(self._band(first, window or self._stop))
        return self._masks[key]

    def _band(self, first: int, window: int) -> mx.array:
        """Boolean [T, S]: key k is seen by query q when q - window < k <= q."""
        queries = mx.arange(self._start, self._stop)[:, None]
        keys = mx.arange(first, self._stop)[None]
        return (keys <= queries) & (queries < keys + window)


class PackedPrefillForward:
    """Chunks of several rows in one forward: to the model, a batch of single tokens, each at its own offset."""

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
        raise TypeError("a model that attends by itself takes one row at a time")

    def dense_mask(self, window: int | None) -> mx.array:
        raise TypeError("a model that attends by itself takes one row at a time")


def _as_row(tokens: mx.array) -> mx.array:
    """[T, heads, 1, head_dim], a batch of tokens → [1, heads, T, head_dim], one row."""
    return tokens.transpose(2, 1, 0, 3)


@dataclass(slots=True, eq=False)
class _Run:
    """Adjacent places of one slab: batch rows [start, stop) are places [place, place + stop - start)."""

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
        """Additive [n, 1, 1, S], made once a step; None when every row sees every key of the span."""
        key = (first, window)
        if key not in self.masks:
            spans = {length - first for length in self.lengths}
            plain = len(spans) == 1 and (window is None or spans.pop() <= window)
            self.masks[key] = None if plain else additive(_visible(self.lengths, first, self.longest, window))
        return self.masks[key]


class DecodeForward:
    """One token for each of n rows, given in pool order. Every row has room for the token."""

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
        """Dense copies [n, kv_heads, longest, head_dim]; what lies past a row's length is masked."""
        longest = max(self._lengths)
        spans = [run.span(layer) for run in self._runs]
        keys = mx.concatenate([_pad(keys, longest) for keys, _ in spans])
        return keys, mx.concatenate([_pad(values, longest) for _, values in spans])

    def dense_mask(self, window: int | None) -> mx.array:
        return _visible(self._lengths, 0, max(self._lengths), window)


class _Write:
    """Batch rows `batch` are `rows` of one slab; where their next token goes is worked out once a step."""

    def __init__(self, slab: Slab, rows: Sequence[KVRow], start: int, total: int) -> None:
        self.slab = slab
        self.batch = slice(start, start + len(rows)) if len(rows) < total else ...
        self._rows = rows
        self._lines: dict[int, mx.array] = {}

    def lines(self, kv_heads: int) -> mx.array:
        if kv_heads not in self._lines:
            self._lines[kv_heads] = self.slab.lines(self._rows, kv_heads)
        return self._lines[kv_heads]


def _writes(rows: Sequence[KVRow]) -> list[_Write]:
    groups = [list(group) for _, group in groupby(rows, key=lambda row: id(row.slab))]
    starts = accumulate((len(group) for group in groups), initial=0)
    return [_Write(group[0].slab, group, start, len(rows)) for group, start in zip(groups, starts, strict=False)]


def _runs(rows: Sequence[KVRow]) -> list[_Run]:
    runs: list[_Run] = []
    for start, row in enumerate(rows):
        last = runs[-1] if runs else None
        if last is not None and last.slab is row.slab and last.place + len(last.lengths) == row.index:
            last.lengths.append(row.length + 1)
        else:
            runs.append(_Run(row.slab, row.index, start, [row.length + 1]))
    return runs


def _visible(lengths: list[int], first: int, longest: int, window: int | None) -> mx.array:
    """Boolean [n, 1, 1, longest - first]: keys below each row's length and inside its window."""
    ends = mx.array(lengths)[:, None]
    keys = mx.arange(first, longest)[None]
    seen = keys < ends
    if window is not None:
        seen = seen & (keys >= ends - window)
    return seen[:, None, None]


def _pad(array: mx.array, tokens: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, 0), (0, tokens - array.shape[2]), (0, 0)])
