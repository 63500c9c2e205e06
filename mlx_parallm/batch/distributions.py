"""The arithmetic of sampling: top-k, top-p and min-p as one threshold per row, inverse-transform sampling, logprobs.

Arithmetic over logits or weights [R, V], in which a row's result does not depend on the other rows of the batch: every
reduction runs along a row in a fixed order (sums by blocks of `BLOCK`), so a row that is taken into a smaller batch
gives the same bits on the CPU. What is elementwise is compiled, which a GPU runs as one kernel; see `prepare_device`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.core.requests import SamplingParams
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


@partial(mx.compile, shapeless=True)
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


# ---- filters -----------------------------------------------------------------------------------
#
# top-k → top-p → min-p as one threshold per row on the unnormalised probabilities. Exact, without branches.
#
# With w = exp(logit - max logit), so max w = 1, a token is kept if w >= threshold. The threshold is the largest of:
#
#     top-k   the k-th largest w
#     top-p   the smallest w for which the strictly larger tokens have less than top_p of the mass that top-k kept
#     min-p   min_p itself
#
# All tokens equal to the threshold in fp32 are kept, so the result never depends on the order of a sort. The most
# probable token is always kept. No value is read on the host, so the cost depends on the options only, and a row's
# threshold does not depend on the options of other rows.

_MIN_WIDTH = 64
"""Smallest `width` of a RankFilter, so that rows with a small top_k share a pass."""

_SORTED_AT_ONCE = 1024
"""Up to this many candidates, a CPU sorts them instead of splitting them."""


@dataclass(frozen=True, slots=True)
class RankFilter:
    """F rows whose threshold is found among their `width` largest weights.

    `top_k`: int32 [F, 1]; None if `width` is the vocabulary and the rows have no top-k. `top_p`: fp32 [F, 1], inf in
    rows without top-p. `any_top_p`: whether any row has one.
    """

    rows: RowSubset
    width: int
    top_k: mx.array | None
    top_p: mx.array
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of D sampled rows. `min_p`: fp32 [D, 1], 0 in rows without min-p."""

    ranks: tuple[RankFilter, ...]
    min_p: mx.array

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> Filters | None:
        """The filters of these rows, or None if no row has any."""
        by_width: dict[int, list[int]] = defaultdict(list)
        for row, options in enumerate(params):
            if _limits_rank(options, vocab_size) or options.top_p < 1:
                by_width[_width(options, vocab_size)].append(row)
        if not by_width and all(options.min_p == 0 for options in params):
            return None
        ranks = tuple(_rank_filter(params, rows, width, vocab_size) for width, rows in sorted(by_width.items()))
        return cls(ranks, mx.array([[options.min_p] for options in params], mx.float32))

    def apply(self, weights: mx.array) -> mx.array:
        """Weights fp32 [D, V], each row's maximum 1 → the same with the weights of dropped tokens set to 0."""
        threshold = self.min_p
        for rank in self.ranks:
            own = _rank_threshold(rank.rows.take(weights), rank)
            threshold = rank.rows.put(mx.maximum(own, rank.rows.take(self.min_p)), threshold)
        return _keep_some(weights, threshold)


@partial(mx.compile, shapeless=True)
def _keep_some(weights: mx.array, threshold: mx.array) -> mx.array:
    """As `keep_from`, but the largest weights, which are 1, are always kept."""
    return weights * (weights >= mx.minimum(threshold, 1.0))


def _limits_rank(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size


def _width(params: SamplingParams, vocab_size: int) -> int:
    """How many of a row's largest weights are needed, rounded up to a power of two so that similar rows share a pass.

    It depends on the row's own top_k only, so that other rows cannot change the result.
    """
    if not _limits_rank(params, vocab_size):
        return vocab_size + 1  # a group apart from rows whose top_k needs the whole vocabulary
    return min(max(_MIN_WIDTH, 1 << (params.top_k - 1).bit_length()), vocab_size)


def _rank_filter(params: Sequence[SamplingParams], rows: list[int], width: int, vocab_size: int) -> RankFilter:
    top_p = [[params[row].top_p if params[row].top_p < 1 else math.inf] for row in rows]
    return RankFilter(
        rows=RowSubset.of(rows, len(params)),
        width=min(width, vocab_size),
        top_k=mx.array([[params[row].top_k] for row in rows], mx.int32) if width <= vocab_size else None,
        top_p=mx.array(top_p, mx.float32),
        any_top_p=any(params[row].top_p < 1 for row in rows),
    )


def _rank_threshold(weights: mx.array, rank: RankFilter) -> mx.array:
    """[F, V] → [F, 1]."""
    if rank.top_k is None:
        total = row_sum(weights)
        candidates = _without_negligible(weights, total, rank.top_p) if on_cpu() else weights
        return nucleus_floor(candidates, rank.top_p * total)
    best = mx.sort(_largest(weights, rank.width), -1)
    floor = mx.take_along_axis(best, rank.width - rank.top_k, -1)
    if not rank.any_top_p:
        return floor
    # Tokens that top-k keeps and that are not in `best` equal `floor`, so `best` holds every candidate threshold.
    total = row_sum(keep_from(weights, floor))
    return mx.maximum(floor, nucleus_floor(best, rank.top_p * total))


def _largest(weights: mx.array, width: int) -> mx.array:
    """The `width` largest values of each row, [F, V] → [F, width], unordered.

    They lie in the `width` blocks with the largest maxima. Metal's partition is a full sort, so the whole vocabulary is
    partitioned only if `width` is at least half the number of blocks.
    """
    blocks = in_blocks(weights, 0.0)
    if 2 * width < blocks.shape[1]:
        best = mx.argpartition(blocks.max(-1), -width, -1)[:, -width:]
        weights = mx.take_along_axis(blocks, best[:, :, None], 1).flatten(1)
    return mx.partition(weights, -width, -1)[:, -width:]


def _without_negligible(weights: mx.array, total: mx.array, top_p: mx.array) -> mx.array:
    """Sets very small weights to 0. Top-p drops them anyway: V of them add up to less than (1 - top_p) * total.

    This changes no result, and `partition` is four times as fast when most values are equal. The bound is halved to
    allow for rounding.
    """
    return keep_from(weights, 0.5 * (1 - top_p) * total / weights.shape[-1])


def nucleus_floor(candidates: mx.array, mass: mx.array, sorted_at_once: int | None = None) -> mx.array:
    """The smallest candidate for which the sum of all strictly larger candidates is less than `mass`.

    A weighted quickselect with static shapes: split the candidates in two halves, sum the upper half, and keep the half
    that holds the result. This touches 2 V values, where a sort would touch V log V.

    Args:
        candidates: fp32 [F, N], >= 0.
        mass: fp32 [F, 1], > 0; inf keeps every candidate.
        sorted_at_once: up to this N the candidates are sorted and not split.

    Returns:
        fp32 [F, 1].
    """
    limit = sorted_at_once or (_SORTED_AT_ONCE if on_cpu() else candidates.shape[-1])
    while (width := candidates.shape[-1]) > limit:
        if width % 2:
            candidates = mx.pad(candidates, [(0, 0), (0, 1)])
        lower, upper = mx.split(mx.partition(candidates, (width + 1) // 2, -1), 2, -1)
        weight = row_sum(upper)
        in_upper = weight >= mass
        candidates = mx.where(in_upper, upper, lower)
        mass = mx.where(in_upper, mass, mass - weight)
    descending = mx.sort(candidates, -1)[:, ::-1]
    return _reached(descending, mx.cumsum(descending, -1), mass).min(-1, keepdims=True)


@partial(mx.compile, shapeless=True)
def _reached(descending: mx.array, cumulative: mx.array, mass: mx.array) -> mx.array:
    """Candidates in descending order, with inf for those whose strictly larger ones have the mass already."""
    return mx.where(cumulative - descending < mass, descending, math.inf)


# ---- sampling ----------------------------------------------------------------------------------
#
# Uniforms are counter-based: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# 2014) read at an index. The mixed seed is the start of the row's stream, and the token's position is the index. A row
# that is preempted and computed again continues at the same position, so it samples the same tokens in any batch.

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


def inverse_cdf(weights: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
    """Samples one token per row with probability weight / total, and never a token of weight 0.

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
    cumulative sum, which selects the largest weight. Both are tokens that the row may sample. This happens about once
    in ten million samples.
    """
    ranked, rests = _ranked(weights, cumulative, point)
    index = ranked.argmax(-1, keepdims=True)
    return index, mx.take_along_axis(rests, index, -1)


@partial(mx.compile, shapeless=True)
def _ranked(weights: mx.array, cumulative: mx.array, point: mx.array) -> tuple[mx.array, mx.array]:
    """The weights with inf where the cumulative sum exceeds `point`, so that the first of these is the largest, and
    `point` minus the sum of the weights before each."""
    above = (cumulative > point) & (weights > 0)
    return mx.where(above, math.inf, weights), point - (cumulative - weights)


# ---- logprobs -----------------------------------------------------------------------------------


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
