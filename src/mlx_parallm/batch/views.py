"""What a model sees of the pool: a cache object per layer, in the shape that mlx-lm's model files expect.

A model file calls, per layer: `cache.offset` (RoPE positions), `cache.make_mask(...)`,
`cache.update_and_fetch(k, v)`, and then attention. With the hook installed attention comes back to
`attend`, which reads the pool in place. Without it (`fetching`), `update_and_fetch` returns dense
copies and `make_mask` a real mask, and the model attends by itself.

Three kinds of forward stand behind it (`prefill.py`, `decode.py`):

    prefill   one row, T tokens            [1, T]   integer offset, causal
    packed    T tokens of several rows     [T, 1]   offset [T]; each row attends to its own tokens only
    decode    n rows, one token each       [n, 1]   offset [n]; rows in pool order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


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
