"""The attention of a pass over the blocks of its rows: its calls, and dense attention, one product over a row's keys.

`block_attention` and `paged_attention` have the other kinds of calls. Which one single tokens use is measured at the
start, see `attention_times`: dense attention of a row is one fused kernel on a GPU, attention by blocks takes five for
any number of rows, and paged attention one or two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import mlx.core as mx

from mlx_parallm.batch.block_attention import BlockAttention, calls, folds_work
from mlx_parallm.batch.distributions import exp
from mlx_parallm.batch.paged_attention import MOST_TOKENS, PagedAttention
from mlx_parallm.batch.spans import Kind, SeenBlocks, kind_of
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.linears import LatentHeads

# ---- dense attention ----------------------------------------------------------------------------


class DenseSpan:
    """Causal attention of T more tokens of one row, in one layer group.

    Args:
        row: the tokens, and the blocks that they see.
        window: a token sees the last `window` positions, its own included; None for all.
    """

    def __init__(self, row: SeenBlocks, window: int | None) -> None:
        self.row = row
        self._window = window
        self._indices: dict[tuple[int, int], mx.array] = {}
        self._masks: dict[mx.Dtype, mx.array] = {}

    def advance(self) -> None:
        """See `AttentionCalls.advance`."""
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
        """See `BlockAttention.attend`. `heads`: expand what the tokens see."""
        dense = self._dense(keys)
        values = dense if values is keys else self._dense(values)
        dense, values = (dense, values) if heads is None else heads.expanded(dense)
        one_row = queries.transpose(2, 1, 0, 3)
        return attention(one_row, dense, values, scale, self._mask(queries.dtype), sinks).transpose(2, 1, 0, 3)

    def _dense(self, array: mx.array) -> mx.array:
        """The row's keys or values, [1, kv_heads, S, head_dim]: a view if its blocks are consecutive, else a copy."""
        kv_heads, total, _, width = array.shape
        if are_consecutive(self.row.block_ids):
            blocks = array[:, self.row.block_ids[0] : self.row.block_ids[-1] + 1]
        else:
            blocks = array.reshape(-1, BLOCK_TOKENS, width)[self._indices_for(kv_heads, total)]
        return blocks.reshape(1, kv_heads, -1, width)[:, :, : self.row.stop - self.row.first]

    def _indices_for(self, kv_heads: int, total: int) -> mx.array:
        """The index of each block in [kv_heads * total], int32 [kv_heads, blocks of the row]."""
        key = (kv_heads, total)
        if key not in self._indices:
            self._indices[key] = mx.arange(kv_heads)[:, None] * total + mx.array(list(self.row.block_ids))
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


def are_consecutive(block_ids: Sequence[int]) -> bool:
    return block_ids[-1] - block_ids[0] == len(block_ids) - 1 and all(b - a == 1 for a, b in pairwise(block_ids))


def _band(row: SeenBlocks, window: int | None) -> mx.array:
    """Boolean [T, S]: query q sees key k if q - window < k <= q."""
    queries = mx.arange(row.start, row.stop)[:, None]
    keys = mx.arange(row.first, row.stop)[None]
    return (keys <= queries) & (queries < keys + (window or row.stop))


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


# ---- the calls of a pass ------------------------------------------------------------------------


Call = DenseSpan | BlockAttention | PagedAttention


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Which calls are used on this device.

    dense_rows: up to so many single tokens attend row by row instead of in one call, if the blocks of each row are
        consecutive. Infinite: all rows attend one by one, because the device has no `gather_mm` for their type.
    kernel: other single tokens, and drafts, attend in the kernel of `paged_attention` instead of by blocks.
    """

    dense_rows: float = 0.0
    kernel: bool = False


class AttentionCalls:
    """The attention of all tokens of a pass in one layer group, in as few calls as pay.

    Args:
        rows: the tokens of the pass in order, with the blocks that they see.
    """

    def __init__(self, rows: Sequence[SeenBlocks], window: int | None, choice: AttentionChoice) -> None:
        self._calls = list(_calls(rows, window, choice))

    def advance(self) -> None:
        """Moves on to the next token of each row, in the same blocks."""
        for _, call in self._calls:
            call.advance()

    def attend(
        self,
        keys: mx.array,
        values: mx.array,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        heads: LatentHeads | None = None,
    ) -> mx.array:
        """See `BlockAttention.attend`; of all tokens. A layer that keeps no values attends to the keys as values.

        `heads`: of latent attention, if their products are left to it. Queries and outputs are then those of heads.
        """
        if heads is not None:
            return mx.concatenate([_of_heads(call, keys, queries, heads, tokens) for tokens, call in self._calls])
        values = values if values.size else keys
        if len(self._calls) == 1:
            return self._calls[0][1].attend(keys, values, queries, scale, sinks)
        outputs = [call.attend(keys, values, queries[tokens], scale, sinks) for tokens, call in self._calls]
        return mx.concatenate(outputs)


def _of_heads(call: Call, keys: mx.array, queries: mx.array, heads: LatentHeads, tokens: slice) -> mx.array:
    """Latent attention of one call's tokens, in the form that is less work."""
    with heads.bank.using_part(tokens.start, tokens.stop):
        if isinstance(call, DenseSpan) and heads.is_expanded(call.row.tokens, call.row.stop, keys.shape[-1]):
            return call.attend(keys, keys, queries[tokens], 1.0, None, heads)
        return heads.absorbed(queries[tokens], lambda absorbed: call.attend(keys, keys, absorbed, 1.0, None))


def _calls(rows: Sequence[SeenBlocks], window: int | None, choice: AttentionChoice) -> Iterator[tuple[slice, Call]]:
    """The attention calls, each with its tokens."""
    start = 0
    for kind, group in groupby(rows, key=lambda row: kind_of(row.tokens)):
        for each, call in _calls_of(kind, list(group), window, choice):
            stop = start + sum(row.tokens for row in each)
            yield slice(start, stop), call
            start = stop


def _calls_of(
    kind: Kind, rows: Sequence[SeenBlocks], window: int | None, choice: AttentionChoice
) -> Iterator[tuple[Sequence[SeenBlocks], Call]]:
    """The calls of rows of one kind, each with its rows."""
    in_kernel = choice.kernel and all(row.tokens <= MOST_TOKENS for row in rows)
    if _is_dense(kind, rows, choice.dense_rows, in_kernel):
        yield from (([row], DenseSpan(row, window)) for row in rows)
    elif in_kernel:
        yield rows, PagedAttention(rows, window)
    else:
        yield from ((each, BlockAttention(each, window)) for each in calls(rows))


def _is_dense(kind: Kind, rows: Sequence[SeenBlocks], dense_rows: float, in_kernel: bool) -> bool:
    """Whether rows of one kind attend one by one, each to dense keys, and not in one call."""
    if math.isinf(dense_rows) or kind is Kind.LONG:
        return True
    if kind is Kind.SHORT:
        return len(rows) == 1 or not (in_kernel or folds_work())
    return len(rows) <= dense_rows and all(are_consecutive(row.block_ids) for row in rows)
