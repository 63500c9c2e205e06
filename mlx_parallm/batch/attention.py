"""Dense attention: one product over all keys of a row. `DenseSpan` reads them from the row's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx

from mlx_parallm.batch.drawing import exp
from mlx_parallm.batch.spans import RowBlocks
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.linears import LatentHeads


class DenseSpan:
    """Causal attention of T more tokens of one row, in one layer group.

    Args:
        row: the tokens, and the blocks that they see.
        window: a token sees the last `window` positions, its own included; None for all.
    """

    def __init__(self, row: RowBlocks, window: int | None) -> None:
        self.row = row
        self._window = window
        self._indices: dict[tuple[int, int], mx.array] = {}
        self._masks: dict[mx.Dtype, mx.array] = {}

    def advance(self) -> None:
        """See `attention_calls.Attention.advance`."""
        self.row = replace(self.row, start=self.row.start + 1)
        self._masks.clear()

    def attend(
        self,
        keys: mx.array,
        values: mx.array,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None = None,
        heads: LatentHeads | None = None,
    ) -> mx.array:
        """See `attention_calls.Attention.attend`. `heads`: expand what the tokens see."""
        dense = self._dense(keys)
        values = dense if values is keys else self._dense(values)
        dense, values = (dense, values) if heads is None else heads.expanded(dense)
        one_row = queries.transpose(2, 1, 0, 3)
        return attention(one_row, dense, values, scale, self._mask(queries.dtype), sinks).transpose(2, 1, 0, 3)

    def _dense(self, array: mx.array) -> mx.array:
        """The row's keys or values, [1, kv_heads, S, head_dim]: a view if its blocks are consecutive, else a copy."""
        kv_heads, places, _, width = array.shape
        if are_consecutive(self.row.places):
            blocks = array[:, self.row.places[0] : self.row.places[-1] + 1]
        else:
            blocks = array.reshape(-1, BLOCK_TOKENS, width)[self._indices_for(kv_heads, places)]
        return blocks.reshape(1, kv_heads, -1, width)[:, :, : self.row.stop - self.row.first]

    def _indices_for(self, kv_heads: int, places: int) -> mx.array:
        """The index of each block in [kv_heads * places], int32 [kv_heads, blocks of the row]."""
        key = (kv_heads, places)
        if key not in self._indices:
            self._indices[key] = mx.arange(kv_heads)[:, None] * places + mx.array(list(self.row.places))
        return self._indices[key]

    def _mask(self, dtype: mx.Dtype) -> mx.array | str | None:
        """The mask for `attention`: additive [T, S], made once, or "causal" or None if that is enough."""
        row = self.row
        banded = self._window is not None and row.stop - row.first > self._window
        if row.tokens == 1 and not banded:
            return None
        if not banded and not on_cpu():
            return "causal"
        if dtype not in self._masks:
            self._masks[dtype] = additive(_band(row, self._window), dtype)
        return self._masks[dtype]


def are_consecutive(places: Sequence[int]) -> bool:
    return places[-1] - places[0] == len(places) - 1 and all(b - a == 1 for a, b in pairwise(places))


def _band(row: RowBlocks, window: int | None) -> mx.array:
    """Boolean [T, S]: query q sees key k if q - window < k <= q."""
    queries = mx.arange(row.start, row.stop)[:, None]
    keys = mx.arange(row.first, row.stop)[None]
    return (keys <= queries) & (queries < keys + (window or row.stop))


# ---- the product -------------------------------------------------------------------------------


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
