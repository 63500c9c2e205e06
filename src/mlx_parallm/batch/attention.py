"""Attention over a span of the pool.

On a GPU this is MLX's fused kernel. On a CPU MLX's own falls back to the plain formula with a scalar
`exp`, which is most of its time; the same formula here folds the query heads that share a key head
into one product, takes the faster `exp` of `rowwise`, and divides after the last product instead of
before it.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.batch.rowwise import exp
from mlx_parallm.model.device import on_cpu


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
        sinks: one logit per head that takes weight and gives no value (gpt-oss), or None.

    Returns:
        [B, heads, T, head_dim of values].
    """
    if on_cpu() and sinks is None and queries.dtype == mx.float32:
        return _on_cpu(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def needs_array_mask() -> bool:
    """Whether "causal" must be spelt out."""
    return on_cpu()


def additive(seen: mx.array, dtype: mx.Dtype) -> mx.array:
    """Boolean mask, true where a query may look → 0 there and -inf elsewhere.

    `dtype` is that of the queries: the fused kernel refuses a mask wider than its output.
    """
    return mx.where(seen, 0.0, -mx.inf).astype(dtype)


def _on_cpu(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
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
