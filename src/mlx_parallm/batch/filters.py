"""top-k → top-p → min-p as one threshold per row on the unnormalised probabilities. Exact, and branch-free.

With w = exp(logit - max logit), so max w = 1, a token stays when w >= threshold:

    top-k   the k-th largest w
    top-p   the smallest w whose strictly larger tokens hold less than top_p of the mass top-k left
    min-p   min_p itself

Tokens equal to the threshold in fp32 all stay, so what is kept never depends on the order of a sort;
the most probable token always stays. Nothing looks at a value on the host: the cost varies with the
options alone, and a row's threshold is computed the same way whatever its neighbours ask for.
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

_NARROWEST = 64
_SORTED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class RankFilter:
    """Rows whose threshold is found among their `width` largest weights. Columns are [F, 1].

    `top_k` None: `width` is the vocabulary. `top_p` inf: that row drops no mass; `any_top_p`: one does.
    """

    rows: RowSubset
    width: int
    top_k: mx.array | None
    top_p: mx.array
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of D drawn rows; `min_p` fp32 [D, 1], zeros when no row has one."""

    ranks: tuple[RankFilter, ...]
    min_p: mx.array

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> Filters | None:
        """None when no row filters."""
        by_width: dict[int, list[int]] = defaultdict(list)
        for row, asked in enumerate(params):
            if _limits_rank(asked, vocab_size) or asked.top_p < 1:
                by_width[_width(asked, vocab_size)].append(row)
        if not by_width and all(asked.min_p == 0 for asked in params):
            return None
        ranks = tuple(_rank_filter(params, rows, width, vocab_size) for width, rows in sorted(by_width.items()))
        return cls(ranks, mx.array([[asked.min_p] for asked in params], mx.float32))

    def apply(self, weights: mx.array) -> mx.array:
        """fp32 [D, V], each row's maximum 1 → the same with the dropped tokens at 0."""
        threshold = self.min_p
        for rank in self.ranks:
            mine = _rank_threshold(rank.rows.take(weights), rank)
            threshold = rank.rows.put(mx.maximum(mine, rank.rows.take(self.min_p)), threshold)
        return keep_from(weights, mx.minimum(threshold, 1.0))


def _limits_rank(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size


def _width(params: SamplingParams, vocab_size: int) -> int:
    """From the row's own top_k, never its neighbours'; a power of two, so that like rows share a pass."""
    if not _limits_rank(params, vocab_size):
        return vocab_size + 1  # sorts apart from a top_k that needs the whole vocabulary
    return min(max(_NARROWEST, 1 << (params.top_k - 1).bit_length()), vocab_size)


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
    # What top-k keeps beyond `best` ties with `floor`, so `best` holds every candidate threshold.
    total = row_sum(keep_from(weights, floor))
    return mx.maximum(floor, nucleus_floor(best, rank.top_p * total))


def _largest(weights: mx.array, width: int) -> mx.array:
    """[F, V] → [F, width], unordered: the largest values lie in the `width` blocks of largest maximum.

    Only a `width` of half the blocks or more looks at the whole vocabulary: Metal's partition is a full sort.
    """
    blocks = in_blocks(weights, 0.0)
    if 2 * width < blocks.shape[1]:
        best = mx.argpartition(blocks.max(-1), -width, -1)[:, -width:]
        weights = mx.take_along_axis(blocks, best[:, :, None], 1).flatten(1)
    return mx.partition(weights, -width, -1)[:, -width:]


def _without_negligible(weights: mx.array, total: mx.array, top_p: mx.array) -> mx.array:
    """Tokens that top-p must drop at 0: V of them together weigh less than (1 - top_p) * total.

    It changes no result, and `partition` is four times as fast where most values are equal.
    (Half the bound, for rounding.)
    """
    return keep_from(weights, 0.5 * (1 - top_p) * total / weights.shape[-1])


def nucleus_floor(candidates: mx.array, mass: mx.array, sorted_at_once: int | None = None) -> mx.array:
    """The smallest candidate whose strictly larger ones together weigh less than `mass`.

    A weighted quickselect with static shapes: halve, weigh the upper half, keep the half that holds
    the floor. It touches 2 V values, where a sort would touch V log V.

    Args:
        candidates: fp32 [F, N], >= 0.
        mass: fp32 [F, 1], > 0; inf keeps every candidate.
        sorted_at_once: N that is sorted rather than halved.

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
