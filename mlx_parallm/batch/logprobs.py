"""Logprobs of sampled tokens and of prompt tokens: lazy arrays, and what the host reads of them.

A batch reports the logprobs of the raw model, or of the distribution that the tokens are sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.distributions import Filters, RowSubset, exp, in_blocks, row_sum
from mlx_parallm.core import TOP_LOGPROBS, ManyCandidates, SamplingParams, TokenLogprob

Candidates = Sequence[tuple[int, float]]

COLDEST = 1e-5
"""Temperatures below this are greedy (vLLM's limit)."""


# ---- arithmetic --------------------------------------------------------------------------------


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


# ---- of sampled tokens ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reported:
    """Lazy logprobs of a batch of R rows.

    Attributes:
        logprobs: fp32 [R], of the sampled tokens. NaN in rows without logprobs.
        top_ids, top_logprobs: int32 and fp32 [R, K], the best tokens of each row, best first. 0 and NaN in rows without
            logprobs. None if no row reports some.
        many: the same, [1, K], of rows that report more than `TOP_LOGPROBS`, by the number of the row.
    """

    logprobs: mx.array
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None
    many: Mapping[int, tuple[mx.array, mx.array]] = field(default_factory=dict)

    def arrays(self) -> list[mx.array]:
        """The arrays that exist, for `mx.async_eval`."""
        several = [part for pair in self.many.values() for part in pair]
        return [array for array in (self.logprobs, self.top_ids, self.top_logprobs, *several) if array is not None]

    def read(self, tokens: Sequence[int], params: Sequence[SamplingParams]) -> list[TokenLogprob | None]:
        """Waits for the arrays. The logprobs of the rows' tokens; None in rows that did not request them."""
        tops: list[Candidates] = [()] * len(tokens)
        if self.top_ids is not None and self.top_logprobs is not None:
            tops = _candidates(self.top_ids, self.top_logprobs)
        for row, best in self.many.items():
            (tops[row],) = _candidates(*best)
        return [
            None if each.top_logprobs is None else TokenLogprob(token, value, top[: each.top_logprobs])
            for each, token, value, top in zip(params, tokens, floats(self.logprobs), tops, strict=True)
        ]


Report = Callable[[mx.array, mx.array, mx.array], Reported]
"""Makes the logprobs of sampled tokens, and the best tokens where rows report some: of the model's own logits, fp32
[R, V], those that penalties, bias and bans have changed, fp32 [R, V], and the sampled tokens, [R]."""


def plan_report(params: Sequence[SamplingParams], vocab_size: int) -> Report | None:
    """How to report the logprobs of a batch with these options; None if no row reports any."""
    wanted = {i: each.top_logprobs for i, each in enumerate(params) if each.top_logprobs is not None}
    rows, count = RowSubset.of(list(wanted), len(params)), len(params)
    processed = _plan_processed(params, vocab_size)
    any_top = any(0 < top <= TOP_LOGPROBS for top in wanted.values())
    more = [(index, i, top) for index, (i, top) in enumerate(wanted.items()) if top > TOP_LOGPROBS]

    def report(raw: mx.array, edited: mx.array, tokens: mx.array) -> Reported:
        logits = rows.take(raw if processed is None else processed(raw, edited))
        normaliser = log_normaliser(logits)
        sampled = token_logprobs(logits, rows.take(tokens), normaliser)
        found = rows.put(sampled, mx.full((count,), float("nan"), mx.float32))
        many = {i: top_logprobs(logits[at : at + 1], normaliser[at : at + 1], top) for at, i, top in more}
        if not any_top:
            return Reported(found, many=many)
        ids, best = top_logprobs(logits, normaliser)
        shape = (count, ids.shape[-1])
        all_ids = rows.put(ids, mx.zeros(shape, mx.int32))
        return Reported(found, all_ids, rows.put(best, mx.full(shape, float("nan"), mx.float32)), many)

    return report if wanted else None


def _plan_processed(
    params: Sequence[SamplingParams], vocab_size: int
) -> Callable[[mx.array, mx.array], mx.array] | None:
    """How the logits of the rows are made whose logprobs are of the distribution that they sample from, of the
    model's own and the edited ones: -inf for tokens that the filters drop. None if there are no such rows."""
    chosen = [i for i, each in enumerate(params) if each.processed_logprobs and each.top_logprobs is not None]
    if not chosen:
        return None
    processing = [_processing(params[i]) for i in chosen]
    rows, filters = RowSubset.of(chosen, len(params)), Filters.of(processing, vocab_size)
    temperature = mx.array([[each.temperature] for each in processing], mx.float32)

    def apply(raw: mx.array, edited: mx.array) -> mx.array:
        logits = rows.take(edited)
        scaled = (logits - logits.max(-1, keepdims=True)) / temperature
        if filters is not None:
            scaled = mx.where(filters.apply(exp(scaled)) > 0, scaled, -mx.inf)
        return rows.put(scaled, raw)

    return apply


def _processing(params: SamplingParams) -> SamplingParams:
    """The temperature and filters that logprobs are computed with. As in vLLM, temperature 0 counts as 1 here."""
    return params if params.temperature >= COLDEST else replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


# ---- of prompt tokens --------------------------------------------------------------------------


class PromptScores:
    """Logprobs of prompt tokens, as lazy arrays.

    Args:
        logits: of the positions before the tokens, [T, V].
        targets: the T tokens.
        top: how many of the best alternatives to return for each.
    """

    def __init__(self, logits: mx.array, targets: Sequence[int], top: int) -> None:
        logits = logits.astype(mx.float32)
        normaliser = log_normaliser(logits)
        ids = mx.array(list(targets), mx.uint32)
        self._targets, self._top = targets, top
        self._scores, self._ranks = token_logprobs(logits, ids, normaliser), token_ranks(logits, ids)
        self._best = top_logprobs(logits, normaliser, top) if top else ()

    def arrays(self) -> list[mx.array]:
        return [self._scores, self._ranks, *self._best]

    def read(self) -> list[TokenLogprob]:
        """Waits for the arrays. The raw model's logprob (fp32), the best alternatives and the rank of each token."""
        tops = [best[: self._top] for best in _candidates(*self._best)] if self._best else [()] * len(self._targets)
        ranks = cast(list[int], self._ranks.tolist())
        return [TokenLogprob(*each) for each in zip(self._targets, floats(self._scores), tops, ranks, strict=True)]


def _candidates(ids: mx.array, logprobs: mx.array) -> list[Candidates]:
    """[T, K] ids and logprobs → T times K candidates."""
    if ids.shape[-1] > TOP_LOGPROBS:
        arrays = zip(np.array(ids, np.int32), np.array(logprobs, np.float32), strict=True)
        return [ManyCandidates.of_bytes(row_ids.tobytes(), row_values.tobytes()) for row_ids, row_values in arrays]
    rows = zip(cast(list[list[int]], ids.tolist()), cast(list[list[float]], logprobs.tolist()), strict=True)
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in rows]


def floats(array: mx.array) -> list[float]:
    return cast(list[float], array.tolist())
