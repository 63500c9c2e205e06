"""Attention over packed tokens: prompts, each followed by its completions, in one forward pass.

    one segment:  prompt        | bucket: rows of one width | bucket: rows of another width
                  p p p p p p p | a a . | b b b             | c c c c c c .

Every prompt is computed once. A row is one completion, and one attention call computes all rows of a bucket: each row
attends to the prompt and to itself. Rows are padded (.) to the width of the bucket's longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from mlx_parallm.batch.attention import additive, attention

_PADDING = 8
"""Padding tokens that a bucket may have; it may have more, up to an eighth of its tokens. They cost less than another
attention call."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`rows` completions of one prompt, each right-padded to `width` tokens. `padding`: padding tokens of all rows."""

    rows: int
    width: int
    padding: int

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
        return self.rows * self.width

    def with_row(self, width: int) -> Bucket:
        """This bucket with another row of `width` tokens."""
        used, widest = self.tokens - self.padding + width, max(self.width, width)
        return Bucket(self.rows + 1, widest, (self.rows + 1) * widest - used)


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt of `prompt` tokens, then its completions, bucket after bucket and row after row."""

    prompt: int
    buckets: tuple[Bucket, ...]

    @property
    def rows(self) -> int:
        return sum(bucket.rows for bucket in self.buckets)

    @property
    def tokens(self) -> int:
        return self.prompt + sum(bucket.tokens for bucket in self.buckets)

    def with_row(self, width: int) -> Segment:
        """This segment with another row: in the last bucket, or in a new one if that would have too much padding."""
        if self.buckets:
            *before, last = self.buckets
            joined = last.with_row(width)
            if joined.padding <= max(_PADDING, joined.tokens // 8):
                return Segment(self.prompt, (*before, joined))
        return Segment(self.prompt, (*self.buckets, Bucket(1, width, 0)))

    def widths(self) -> Iterator[int]:
        """The padded width of each row."""
        for bucket in self.buckets:
            yield from [bucket.width] * bucket.rows

    def positions(self) -> Iterator[int]:
        """The position of each token in its own sequence."""
        yield from range(self.prompt)
        for width in self.widths():
            yield from range(self.prompt, self.prompt + width)


@dataclass(frozen=True, slots=True)
class Window:
    """Passed to attention in place of a mask. `size`: the layer's sliding window in tokens; None: it has no window."""

    size: int | None


@dataclass(frozen=True, slots=True)
class PackedStream:
    """Layout of packed tokens, passed to the model's layers in place of KV caches. `offset`: positions, int32 [N]."""

    segments: tuple[Segment, ...]
    offset: mx.array

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> PackedStream:
        return cls(tuple(segments), mx.array([at for each in segments for at in each.positions()], mx.int32))

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> Window:
        return Window(window_size)


class PackedCache:
    """Keys and values of one layer in one forward pass, and the attention over them."""

    def __init__(self, stream: PackedStream) -> None:
        self.offset = stream.offset
        self._segments = stream.segments

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Stores keys and values, [N, kv_heads, 1, head_dim], for `attend`, and returns them unchanged."""
        self._keys, self._values = keys, values
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: Window, sinks: mx.array | None) -> mx.array:
        """Attention of all tokens, [N, heads, 1, head_dim] → the same shape. Prompts attend to themselves, completions
        also to their prompt."""
        starts = accumulate((segment.tokens for segment in self._segments), initial=0)
        parts = [
            part
            for segment, start in zip(self._segments, starts, strict=False)
            for part in self._attend_segment(segment, start, queries, scale, mask.size, sinks)
        ]
        return mx.concatenate(parts)

    def _attend_segment(
        self, segment: Segment, start: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> Iterator[mx.array]:
        stop = start + segment.prompt
        keys, values = _rows(self._keys[start:stop], 1), _rows(self._values[start:stop], 1)
        prompt = _rows(queries[start:stop], 1)
        yield _tokens(attention(prompt, keys, values, scale, _mask(0, segment.prompt, window, prompt.dtype), sinks))
        for bucket in segment.buckets:
            if not bucket.width:
                continue
            start, stop = stop, stop + bucket.tokens
            own_keys, own_values = (_rows(each[start:stop], bucket.rows) for each in (self._keys, self._values))
            mask = _mask(segment.prompt, bucket.width, window, queries.dtype)
            rest = _rows(queries[start:stop], bucket.rows)
            yield _tokens(attention(rest, _join(keys, own_keys), _join(values, own_values), scale, mask, sinks))


def _rows(tokens: mx.array, rows: int) -> mx.array:
    """[rows · T, heads, 1, head_dim] → [rows, heads, T, head_dim]."""
    _, heads, _, width = tokens.shape
    return tokens.reshape(rows, -1, heads, width).swapaxes(1, 2)


def _tokens(rows: mx.array) -> mx.array:
    """[rows, heads, T, head_dim] → [rows · T, heads, 1, head_dim]."""
    _, heads, _, width = rows.shape
    return rows.swapaxes(1, 2).reshape(-1, heads, 1, width)


def _join(prompt: mx.array, own: mx.array) -> mx.array:
    """Puts the prompt, [1, heads, P, head_dim], before each row of [G, heads, T, head_dim]."""
    return mx.concatenate([mx.broadcast_to(prompt, (own.shape[0], *prompt.shape[1:])), own], axis=2)


def _mask(offset: int, tokens: int, window: int | None, dtype: mx.Dtype) -> mx.array:
    """Additive causal mask [T, offset + T] of T tokens from position `offset` on. A window limits how far back they
    attend."""
    queries = mx.arange(offset, offset + tokens)[:, None]
    keys = mx.arange(offset + tokens)[None]
    seen = keys <= queries
    return additive(seen if window is None else seen & (keys > queries - window), dtype)
