"""The cache objects, one per layer, through which mlx-lm's model files use the KV pool.

For each layer, a model file calls `cache.offset` (RoPE positions), `cache.make_mask(...)`,
`cache.update_and_fetch(k, v)`, and then attention. With the attention hook installed (`LayerCache`), attention calls
`cache.attend`, which reads the pool in place. Without it (`FetchingLayerCache`), `update_and_fetch` returns dense
copies and `make_mask` a real mask, and the model computes attention itself.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.batch.fetching import FetchingForward
from mlx_parallm.batch.forward import Forward
from mlx_parallm.model.recurrent import PassMask


class AttentionMask(PassMask):
    """The object that `make_mask` passes through the model to `attend`. The layer's group knows the window."""


class LayerCache:
    """The cache object of one layer for one forward pass, with the attention hook installed."""

    def __init__(self, forward: Forward, layer: int) -> None:
        self.offset = forward.offset
        self._forward = forward
        self._layer = layer

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> AttentionMask:
        return AttentionMask()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes the new keys and values and returns them unchanged, because `attend` reads the pool."""
        self._forward.write(self._layer, keys, values)
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        """Attention of queries [N, heads, 1, head_dim] over all written tokens of their rows, the new ones included.

        Raises:
            TypeError: the model made an attention mask of its own.
        """
        if not isinstance(mask, AttentionMask):
            raise TypeError("the model makes its own attention mask; it cannot be batched")
        return self._forward.attend(self._layer, queries, scale, sinks)


class FetchingLayerCache:
    """The cache object of one layer for a model that computes attention itself.

    `grouped`: the model's attention scores are [B, kv_heads, group, T, S].
    """

    def __init__(self, forward: FetchingForward, layer: int, grouped: bool) -> None:
        self.offset = forward.offset
        self._forward = forward
        self._layer = layer
        self._grouped = grouped

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        mask = self._forward.dense_mask(window_size)
        return mx.expand_dims(mask, 1) if self._grouped else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._forward.write(self._layer, keys, values)
        return self._forward.fetch(self._layer)
