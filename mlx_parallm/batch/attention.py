"""The cache objects, one per layer, through which mlx-lm's model files use the KV pool, and attention over the pool.

For each layer, a model file calls `cache.offset` (RoPE positions), `cache.make_mask(...)`,
`cache.update_and_fetch(k, v)`, and then attention. With the attention hook installed (`LayerCache`), attention calls
`cache.attend`, which reads the pool in place. Without it (`FetchingLayerCache`), `update_and_fetch` returns dense
copies and `make_mask` a real mask, and the model computes attention itself.

There are three kinds of forward pass (`forwards.py`):

    prefill   one row, T tokens            [1, T]   integer offset, causal
    packed    T tokens of several rows     [T, 1]   offset [T]; each row attends to its own tokens only
    decode    n rows, one token each       [n, 1]   offset [n]; rows in pool order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_parallm.batch.rowwise import exp
from mlx_parallm.model.device import on_cpu


class Forward(Protocol):
    """One forward pass over rows of the pool, shared by its layers.

    Keys and values are [B, kv_heads, T, head_dim] and queries [B, heads, T, head_dim], with B and T as in the table
    above. `offset`: the position of the first new token in each row.
    """

    offset: int | mx.array

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Writes the new tokens' keys and values into the pool."""
        ...

    def attend(
        self, layer: int, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention over all written tokens of each row, including the new ones."""
        ...

    def fetch(self, layer: int) -> tuple[mx.array, mx.array]:
        """Dense keys and values of all written tokens."""
        ...

    def dense_mask(self, window: int | None) -> mx.array:
        """A boolean mask for the keys that `fetch` returns, true where a query may attend to a key."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The object that `make_mask` passes through the model to `attend`. `window`: the sliding window, or None."""

    window: int | None


class LayerCache:
    """The cache object of one layer for one forward pass, with the attention hook installed."""

    def __init__(self, forward: Forward, layer: int) -> None:
        self.offset = forward.offset
        self._forward = forward
        self._layer = layer

    def make_mask(self, _tokens: int, return_array: bool = False, window_size: int | None = None) -> AttentionMask:
        return AttentionMask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes the new keys and values and returns them unchanged, because `attend` reads the pool."""
        self._forward.write(self._layer, keys, values)
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        """Attention of queries [B, heads, T, head_dim] over all written tokens, including the new ones.

        Raises:
            TypeError: the model made an attention mask of its own.
        """
        if not isinstance(mask, AttentionMask):
            raise TypeError("the model makes its own attention mask; it cannot be batched")
        return self._forward.attend(self._layer, queries, scale, mask.window, sinks)


class FetchingLayerCache:
    """The cache object of one layer for a model that computes attention itself.

    `grouped`: the model's attention scores are [B, kv_heads, group, T, S].
    """

    def __init__(self, forward: Forward, layer: int, grouped: bool) -> None:
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


# ---- attention over a span of the pool ---------------------------------------------------------


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """softmax(scale · Q Kᵀ + mask) V.

    Args:
        queries: [B, heads, T, head_dim].
        keys, values: [B, kv_heads, S, head_dim], heads a multiple of kv_heads.
        mask: additive, [B, 1, 1, S] or [T, S]; or "causal", not on a CPU; or None.
        sinks: one logit per head that takes part in the softmax but has no value (gpt-oss), or None.

    Returns:
        [B, heads, T, head_dim of values].
    """
    if on_cpu() and sinks is None and queries.dtype == mx.float32:
        return _on_cpu(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def needs_array_mask() -> bool:
    """Whether `attention` on this device needs an array instead of the mask "causal"."""
    return on_cpu()


def additive(seen: mx.array, dtype: mx.Dtype) -> mx.array:
    """Converts a boolean mask, true where a query may attend, into an additive one: 0 there and -inf elsewhere.

    `dtype` is the queries' type, because the fused kernel refuses a mask that is wider than its output.
    """
    return mx.where(seen, 0.0, -mx.inf).astype(dtype)


def _on_cpu(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """The same formula, faster than MLX's on a CPU, where a scalar `exp` takes most of the time.

    It combines the query heads that share a key head into one product, uses the faster `exp` of `rowwise`, and divides
    after the last product instead of before it.
    """
    batch, heads, tokens, width = queries.shape
    kv_heads = keys.shape[1]
    if tokens == 1:  # the heads that share a key head become the rows of one product
        grouped = queries.reshape(batch, kv_heads, -1, width)
    else:
        grouped = queries.reshape(batch, kv_heads, -1, tokens, width)
        keys, values = keys[:, :, None], values[:, :, None]
    turned = keys.swapaxes(-1, -2)
    scores = mx.addmm(mask, grouped, turned, alpha=scale) if isinstance(mask, mx.array) else scale * (grouped @ turned)
    weights = exp(scores - scores.max(-1, keepdims=True))
    outputs: mx.array = (weights @ values) / weights.sum(-1, keepdims=True)
    return outputs.reshape(batch, heads, tokens, -1)
