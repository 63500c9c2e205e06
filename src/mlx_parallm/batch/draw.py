"""Inverse-CDF drawing in vocabulary order, in two levels so that no pass but one touches all of V.

weights [D, V] → block sums [D, V / 64] → the block in which u * total falls → the token inside it
"""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.batch.rowwise import in_blocks


def draw(weights: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
    """Draws one token per row with probability weight / total. Never a token of weight 0.

    Args:
        weights: fp32 [D, V], >= 0, at least one > 0 in each row; need not sum to 1.
        u: fp32 [D, 1] in [0, 1).

    Returns:
        tokens uint32 [D], and the rows' totals fp32 [D].
    """
    blocks = in_blocks(weights, 0.0)
    sums = blocks.sum(-1)
    cumulative = mx.cumsum(sums, -1)
    total = cumulative[:, -1:]
    block, rest = _first_above(sums, cumulative, u * total)
    inside = mx.take_along_axis(blocks, block[:, :, None], 1).squeeze(1)
    offset, _ = _first_above(inside, mx.cumsum(inside, -1), rest)
    tokens = block * blocks.shape[-1] + offset
    return tokens.squeeze(-1), total.squeeze(-1)


def _first_above(weights: mx.array, cumulative: mx.array, point: mx.array) -> tuple[mx.array, mx.array]:
    """Index [D, 1] of the first positive weight whose cumulative sum exceeds `point`, and what of `point` is left.

    Rounding may put the rest a little below 0, which the first positive weight takes, or past the last
    cumulative sum, which the largest takes: still tokens the row may draw, in one case of some ten million.
    """
    hit = (cumulative > point) & (weights > 0)
    index = mx.where(hit.any(-1, keepdims=True), hit.argmax(-1, keepdims=True), weights.argmax(-1, keepdims=True))
    before = mx.take_along_axis(cumulative, index, -1) - mx.take_along_axis(weights, index, -1)
    return index, point - before
