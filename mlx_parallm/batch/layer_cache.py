"""The cache objects, one per layer, through which mlx-lm's model files use the KV pool.

For each layer, a model file calls `cache.offset` (RoPE positions), `cache.make_mask(...)`,
`cache.update_and_fetch(k, v)`, and then attention. With the attention hook installed (`LayerCache`), attention asks the
`PassAttention`, which reads the pool in place. Without it (`FetchingLayerCache`), `update_and_fetch` returns dense
copies and `make_mask` a real mask, and the model computes attention itself.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.batch.fetching import FetchingForward
from mlx_parallm.batch.forward import Forward
from mlx_parallm.model.recurrent import PassMask


class AttentionMask(PassMask):
    """The object that `make_mask` passes through the model to attention. The layer's group knows the window."""


class PassAttention:
    """The attention of one forward pass. Implements `hooks.Attention`: the cache that has returned the keys answers,
    whichever layer asks, so layers may share keys and values."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[mx.array, LayerCache]] = {}

    def own(self, keys: mx.array, owner: LayerCache) -> None:
        """Lets this cache answer for these keys, which are kept so that no others get their id."""
        self._owners[id(keys)] = keys, owner

    def forget(self) -> None:
        """Drops all keys. Call it when the pass is built: the caches that it holds hold it too."""
        self._owners.clear()

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: object,
        scale: float,
        mask: object,
        sinks: mx.array | None,
    ) -> mx.array:
        """See `hooks.Attention.attend`. Keys that the model has changed, such as their type, are those of `cache`.

        Raises:
            TypeError: no cache has returned these keys.
        """
        _, owner = self._owners.get(id(keys), (keys, cache))
        if not isinstance(owner, LayerCache):
            raise TypeError("the model attends to keys that no cache has returned; it cannot be batched")
        return owner.attend(queries, scale, mask, sinks)


class LayerCache:
    """The cache object of one layer for one forward pass, with the attention hook installed.

    With latent attention, a layer stores keys [latent, part with positions] and the latent as values. In place of that
    part, mlx-lm's code gets the identity: what it computes as the scores of the part are then the queries of the part,
    scaled, and they arrive as the mask. So attention is one call over whole keys.

    Args:
        latent: see `LayerSpec`.
    """

    def __init__(self, forward: Forward, layer: int, attention: PassAttention, latent: int = 0) -> None:
        self.offset = forward.offset
        self._forward = forward
        self._layer = layer
        self._attention = attention
        self._latent = latent
        self._returned: tuple[mx.array, mx.array] | None = None

    def make_mask(
        self, _tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> AttentionMask | None:
        return None if self._latent else AttentionMask()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes the new keys and values and returns them unchanged, because attention reads the pool."""
        if self._latent:
            self._forward.write(self._layer, mx.concatenate([keys, values], -1), keys)
            values = mx.eye(self._latent, dtype=values.dtype)[None, None]
        else:
            self._forward.write(self._layer, keys, values)
        self._attention.own(keys, self)
        self._returned = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` has returned, for a layer that shares it."""
        assert self._returned is not None
        return self._returned

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        """Attention of queries [N, heads, 1, head_dim] over all written tokens of their rows, the new ones included.

        Raises:
            TypeError: the model made an attention mask of its own.
        """
        if self._latent and isinstance(mask, mx.array):
            queries = mx.concatenate([queries * scale, mask], -1)
            return self._forward.attend(self._layer, queries, 1.0, sinks)
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
