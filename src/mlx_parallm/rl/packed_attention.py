"""Attention of packed tokens: prompts, each with its continuations, in one forward.

    prompt             | rows of one width      | rows of another
    p p p p p p p      | a a . | b b b          | c c c c c c .

Every prompt is computed once. A bucket of continuations looks at it and at itself in one attention call, padded to the
width of the bucket's longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from mlx_parallm.batch.attention import additive, attention


@dataclass(frozen=True, slots=True)
class Bucket:
    """`rows` continuations of one prompt, right-padded to `width` tokens each, with `padding` tokens in all."""

    rows: int
    width: int
    padding: int

    @property
    def tokens(self) -> int:
        """Padding included."""
        return self.rows * self.width

    def with_row(self, width: int) -> Bucket:
        """The same and one row more, of so many tokens."""
        used, widest = self.tokens - self.padding + width, max(self.width, width)
        return Bucket(self.rows + 1, widest, (self.rows + 1) * widest - used)


@dataclass(frozen=True, slots=True)
class Lie:
    """A prompt of `prompt` tokens, then continuations of it, bucket after bucket and row after row."""

    prompt: int
    buckets: tuple[Bucket, ...]

    @property
    def rows(self) -> int:
        return sum(bucket.rows for bucket in self.buckets)

    @property
    def tokens(self) -> int:
        return self.prompt + sum(bucket.tokens for bucket in self.buckets)

    def widths(self) -> Iterator[int]:
        """Of each row, padding included."""
        for bucket in self.buckets:
            yield from [bucket.width] * bucket.rows

    def positions(self) -> Iterator[int]:
        """In its own sequence, of each token."""
        yield from range(self.prompt)
        for width in self.widths():
            yield from range(self.prompt, self.prompt + width)


@dataclass(frozen=True, slots=True)
class Window:
    """Stands for an attention mask: the model asked for a sliding window of so many keys, or for all."""

    size: int | None


@dataclass(frozen=True, slots=True)
class PackedStream:
    """Stands for every layer's cache while the trunk runs. `offset`: the tokens' positions, int32 [N]."""

    lies: tuple[Lie, ...]
    offset: mx.array

    @classmethod
    def of(cls, lies: Sequence[Lie]) -> PackedStream:
        return cls(tuple(lies), mx.array([at for lie in lies for at in lie.positions()], mx.int32))

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> Window:
        return Window(window_size)


class PackedCache:
    """One layer's keys and values in one forward, and its attention over them."""

    def __init__(self, stream: PackedStream) -> None:
        self.offset = stream.offset
        self._lies = stream.lies

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """[N, kv_heads, 1, head_dim], handed back as they came: `attend` has them."""
        self._keys, self._values = keys, values
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: Window, sinks: mx.array | None) -> mx.array:
        """[N, heads, 1, head_dim] → the same: a prompt looks at itself, a continuation at its prompt and itself."""
        starts = accumulate((lie.tokens for lie in self._lies), initial=0)
        parts = [
            part
            for lie, start in zip(self._lies, starts, strict=False)
            for part in self._attend_one(lie, start, queries, scale, mask.size, sinks)
        ]
        return mx.concatenate(parts)

    def _attend_one(
        self, lie: Lie, start: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> Iterator[mx.array]:
        stop = start + lie.prompt
        keys, values = _rows(self._keys[start:stop], 1), _rows(self._values[start:stop], 1)
        prompt = _rows(queries[start:stop], 1)
        yield _tokens(attention(prompt, keys, values, scale, _mask(0, lie.prompt, window, prompt.dtype), sinks))
        for bucket in lie.buckets:
            if not bucket.width:
                continue
            start, stop = stop, stop + bucket.tokens
            own_keys, own_values = (_rows(each[start:stop], bucket.rows) for each in (self._keys, self._values))
            mask = _mask(lie.prompt, bucket.width, window, queries.dtype)
            rest = _rows(queries[start:stop], bucket.rows)
            yield _tokens(attention(rest, _after(keys, own_keys), _after(values, own_values), scale, mask, sinks))


def _rows(tokens: mx.array, rows: int) -> mx.array:
    """[rows · T, heads, 1, head_dim], single tokens → [rows, heads, T, head_dim]."""
    _, heads, _, width = tokens.shape
    return tokens.reshape(rows, -1, heads, width).swapaxes(1, 2)


def _tokens(rows: mx.array) -> mx.array:
    """The way back."""
    _, heads, _, width = rows.shape
    return rows.swapaxes(1, 2).reshape(-1, heads, 1, width)


def _after(prompt: mx.array, own: mx.array) -> mx.array:
    """[1, heads, P, head_dim] before each row of [G, heads, T, head_dim]."""
    return mx.concatenate([mx.broadcast_to(prompt, (own.shape[0], *prompt.shape[1:])), own], axis=2)


def _mask(offset: int, tokens: int, window: int | None, dtype: mx.Dtype) -> mx.array:
    """Additive [T, offset + T]: the token at offset + i looks at none after itself, and no farther than its window."""
    queries = mx.arange(offset, offset + tokens)[:, None]
    keys = mx.arange(offset + tokens)[None]
    seen = keys <= queries
    return additive(seen if window is None else seen & (keys > queries - window), dtype)
