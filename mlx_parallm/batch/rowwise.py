"""Arithmetic over logits [R, V] in which a row's result does not depend on the other rows of the batch.

Every reduction runs along a row in a fixed order (sums by blocks of `BLOCK`), so a row that is taken into a smaller
batch gives the same bits on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.core import TOP_LOGPROBS
from mlx_parallm.model.device import on_cpu

BLOCK = 64
"""Number of tokens that are summed together. It divides most vocabulary sizes, so that few need padding."""


@dataclass(frozen=True, slots=True)
class RowSubset:
    """The rows of a batch that one stage works on. `index`: int32 [n], or None for all rows."""

    index: mx.array | None

    @classmethod
    def of(cls, chosen: Sequence[int], rows: int) -> RowSubset:
        """The rows `chosen`, in ascending order, of a batch of `rows`. If all are chosen, nothing is copied."""
        return cls(None if len(chosen) == rows else mx.array(list(chosen), mx.int32))

    def take(self, batch: mx.array) -> mx.array:
        """[R, ...] → [n, ...]."""
        return batch if self.index is None else batch[self.index]

    def put(self, part: mx.array, batch: mx.array) -> mx.array:
        """A copy of `batch` [R, ...] with the subset's rows replaced by `part` [n, ...]."""
        if self.index is None:
            return part
        merged = mx.array(batch)
        merged[self.index] = part
        return merged


def exp(x: mx.array) -> mx.array:
    """e**x in fp32, for x <= 0. On MLX's CPU backend `power` is 2.5 times as fast as `exp`, and slightly more exact."""
    return mx.power(math.e, x) if on_cpu() else mx.exp(x)


def keep_from(weights: mx.array, floor: mx.array) -> mx.array:
    """Finite weights [R, V] with those below `floor` [R, 1] set to 0. On the CPU `where` takes five times as long."""
    return weights * (weights >= floor)


def in_blocks(x: mx.array, fill: float) -> mx.array:
    """[R, V] → [R, ceil(V / BLOCK), BLOCK]. The last block is padded with `fill`."""
    missing = -x.shape[-1] % BLOCK
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)], constant_values=fill)
    return x.reshape(x.shape[0], -1, BLOCK)


def row_sum(x: mx.array) -> mx.array:
    """[R, V] → [R, 1]."""
    return in_blocks(x, 0.0).sum(-1).sum(-1, keepdims=True)


# ---- logprobs ----------------------------------------------------------------------------------


def log_normaliser(logits: mx.array) -> mx.array:
    """logsumexp of each row: fp32 [N, V] → fp32 [N, 1]."""
    peak = logits.max(-1, keepdims=True)
    return peak + mx.log(row_sum(exp(logits - peak)))


def token_logprobs(logits: mx.array, tokens: mx.array, normaliser: mx.array) -> mx.array:
    """Logprob of one token per row: fp32 [N, V], int [N], fp32 [N, 1] → fp32 [N], nats."""
    return (mx.take_along_axis(logits, tokens[:, None], -1) - normaliser).squeeze(-1)


def token_ranks(logits: mx.array, tokens: mx.array) -> mx.array:
    """Rank of one token per row, 1 for the most likely: fp32 [N, V], int [N] → int32 [N]. Ties have the same rank."""
    own = mx.take_along_axis(logits, tokens[:, None], -1)
    return (logits > own).sum(-1) + 1


def top_logprobs(logits: mx.array, normaliser: mx.array, wanted: int = TOP_LOGPROBS) -> tuple[mx.array, mx.array]:
    """The best tokens of each row, best first. Ties are sorted by token id. At least `TOP_LOGPROBS` are found, so that
    which of them ties does not depend on what other rows want.

    Args:
        logits: fp32 [N, V].
        normaliser: fp32 [N, 1], the result of `log_normaliser`.
        wanted: how many tokens of each row are needed.

    Returns:
        ids int32 and logprobs fp32, both [N, K], K = min(max(wanted, TOP_LOGPROBS), V). Of tokens that tie for the last
        place, any may be returned, but always the same ones for the same row.
    """
    ids = mx.sort(_top_ids(logits, min(max(wanted, TOP_LOGPROBS), logits.shape[-1])), -1)
    values = mx.take_along_axis(logits, ids, -1)
    order = mx.argsort(-values, -1)  # stable: equal values stay in order of id
    best = mx.take_along_axis(values, order, -1)
    return mx.take_along_axis(ids, order, -1), best - normaliser


def _top_ids(logits: mx.array, k: int) -> mx.array:
    """int32 [N, k], unordered. The k largest values lie in the k blocks with the largest maxima."""
    if k == logits.shape[-1]:
        return mx.broadcast_to(mx.arange(k, dtype=mx.int32), logits.shape)
    blocks = in_blocks(logits, -mx.inf)
    rows, count, size = blocks.shape
    if count <= k:
        return mx.argpartition(logits, -k, -1)[:, -k:].astype(mx.int32)
    block = mx.argpartition(blocks.max(-1), -k, -1)[:, -k:].astype(mx.int32)
    ids = (block[:, :, None] * size + mx.arange(size, dtype=mx.int32)).reshape(rows, -1)
    inside = mx.take_along_axis(blocks, block[:, :, None], 1).reshape(rows, -1)
    return mx.take_along_axis(ids, mx.argpartition(inside, -k, -1)[:, -k:], -1)


# ---- drawing -----------------------------------------------------------------------------------
#
# Uniforms are counter-based: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# 2014) read at an index. The mixed seed is the start of the row's stream, and the token's position is the index. A row
# that is preempted and computed again continues at the same position, so it draws the same tokens in any batch.

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BITS = 24
"""fp32 represents every k / 2**24 exactly, so the largest uniform stays below 1."""


def streams(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The start of each seed's stream, uint64 [n]. Seeds count modulo 2**64."""
    return _mix(np.array([seed % 2**64 for seed in seeds], np.uint64) * _GAMMA + _GAMMA)


def uniforms(starts: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """The uniform of each stream at its position (>= 0): fp32 [n] in [0, 1), multiples of 2**-24."""
    mixed = _mix(starts + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(64 - _BITS)).astype(np.float32) * np.float32(2.0**-_BITS)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(weights: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
    """Draws one token per row with probability weight / total, and never a token of weight 0.

    Inverts the cumulative distribution in two levels, so that only one pass touches all of V:

        weights [D, V] → block sums [D, V / BLOCK] → the block in which u * total falls → the token inside it

    Args:
        weights: fp32 [D, V], >= 0, at least one > 0 in each row. They need not sum to 1.
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
    """Index [D, 1] of the first positive weight whose cumulative sum exceeds `point`, and the rest: `point` minus the
    sum of the weights before it.

    Because of rounding, the rest may be slightly below 0, which selects the first positive weight, or beyond the last
    cumulative sum, which selects the largest weight. Both are tokens that the row may draw. This happens about once in
    ten million draws.
    """
    hit = (cumulative > point) & (weights > 0)
    index = mx.where(hit.any(-1, keepdims=True), hit.argmax(-1, keepdims=True), weights.argmax(-1, keepdims=True))
    before = mx.take_along_axis(cumulative, index, -1) - mx.take_along_axis(weights, index, -1)
    return index, point - before
