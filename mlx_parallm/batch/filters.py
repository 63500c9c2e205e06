"""top-k → top-p → min-p as one threshold per row on the unnormalised probabilities. Exact, without branches.

With w = exp(logit - max logit), so max w = 1, a token is kept if w >= threshold. The threshold is the largest of:

    top-k   the k-th largest w
    top-p   the smallest w for which the strictly larger tokens have less than top_p of the mass that top-k kept
    min-p   min_p itself

All tokens equal to the threshold in fp32 are kept, so the result never depends on the order of a sort. The most
probable token is always kept. No value is read on the host, so the cost depends on the options only, and a row's
threshold does not depend on the options of other rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.batch.rowwise import RowSubset, in_blocks, keep_from, row_sum
from mlx_parallm.core import SamplingParams
from mlx_parallm.model.device import on_cpu

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
    """The filters of D drawn rows. `min_p`: fp32 [D, 1], 0 in rows without min-p."""

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
        return keep_from(weights, mx.minimum(threshold, 1.0))


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
        return nucleus_floor(_without_negligible(weights, total, rank.top_p), rank.top_p * total)
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
    larger = mx.cumsum(descending, -1) - descending
    return mx.where(larger < mass, descending, math.inf).min(-1, keepdims=True)
