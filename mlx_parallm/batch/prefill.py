"""Prefill forward passes: the next tokens of one row, or of several rows packed into one batch of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from mlx_parallm.batch.attention import additive, attention, needs_array_mask
from mlx_parallm.batch.slab import KVRow


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
