"""The logprobs that a batch reports: of the raw model, or of the distribution that draws the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from mlx_parallm.batch.filters import Filters
from mlx_parallm.batch.rowwise import RowSubset, exp, log_normaliser, token_logprobs, top_logprobs
from mlx_parallm.core import TOP_LOGPROBS, SamplingParams

COLDEST = 1e-5
"""Temperatures below this are greedy (vLLM's limit)."""


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """The P rows of a batch whose logprobs are of the distribution that draws their tokens.

    `temperature`: fp32 [P, 1], 1 in greedy rows. `filters`: None if none of them filters.
    """

    rows: RowSubset
    temperature: mx.array
    filters: Filters | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> ProcessedRows | None:
        """These rows of a batch with the options `params`; None if there are none."""
        chosen = [i for i, each in enumerate(params) if each.processed_logprobs and each.top_logprobs is not None]
        if not chosen:
            return None
        processing = [_processing(params[i]) for i in chosen]
        return cls(
            rows=RowSubset.of(chosen, len(params)),
            temperature=mx.array([[each.temperature] for each in processing], mx.float32),
            filters=Filters.of(processing, vocab_size),
        )

    def apply(self, raw: mx.array, edited: mx.array) -> mx.array:
        """`raw` [R, V] with the logits of these rows replaced by those that tokens are drawn from, -inf for tokens that
        the filters drop."""
        logits = self.rows.take(edited)
        scaled = (logits - logits.max(-1, keepdims=True)) / self.temperature
        if self.filters is not None:
            scaled = mx.where(self.filters.apply(exp(scaled)) > 0, scaled, -mx.inf)
        return self.rows.put(scaled, raw)


def _processing(params: SamplingParams) -> SamplingParams:
    """The temperature and filters that logprobs are computed with. As in vLLM, temperature 0 counts as 1 here."""
    return params if params.temperature >= COLDEST else replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True, slots=True)
class Reported:
    """Lazy logprobs of a batch of R rows.

    Attributes:
        logprobs: fp32 [R], of the drawn tokens. NaN in rows without logprobs.
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
        every = (
            self.logprobs,
            self.top_ids,
            self.top_logprobs,
            *(part for pair in self.many.values() for part in pair),
        )
        return [array for array in every if array is not None]


@dataclass(frozen=True, slots=True)
class ReportedLogprobs:
    """The rows of a batch that report logprobs. `count`: rows of the batch. `any_top`: whether one of them reports
    a few alternatives. `many`: the place among them, the number in the batch and the alternatives of those that report
    more than `TOP_LOGPROBS`."""

    rows: RowSubset
    count: int
    processed: ProcessedRows | None
    any_top: bool
    many: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> ReportedLogprobs | None:
        """These rows of a batch with the options `params`; None if there are none."""
        wanted = {i: each.top_logprobs for i, each in enumerate(params) if each.top_logprobs is not None}
        if not wanted:
            return None
        return cls(
            rows=RowSubset.of(list(wanted), len(params)),
            count=len(params),
            processed=ProcessedRows.of(params, vocab_size),
            any_top=any(0 < top <= TOP_LOGPROBS for top in wanted.values()),
            many=tuple((place, i, top) for place, (i, top) in enumerate(wanted.items()) if top > TOP_LOGPROBS),
        )

    def of_tokens(self, raw: mx.array, edited: mx.array, tokens: mx.array) -> Reported:
        """The logprobs of the drawn tokens, and the best tokens where rows report some.

        Args:
            raw: the model's own logits, fp32 [R, V].
            edited: those that penalties, bias and bans have changed, fp32 [R, V].
            tokens: the drawn tokens, [R].
        """
        logits = self.rows.take(raw if self.processed is None else self.processed.apply(raw, edited))
        normaliser = log_normaliser(logits)
        drawn = token_logprobs(logits, self.rows.take(tokens), normaliser)
        found = self.rows.put(drawn, mx.full((self.count,), float("nan"), mx.float32))
        many = {
            number: top_logprobs(logits[place : place + 1], normaliser[place : place + 1], wanted)
            for place, number, wanted in self.many
        }
        if not self.any_top:
            return Reported(found, many=many)
        ids, best = top_logprobs(logits, normaliser)
        shape = (self.count, ids.shape[-1])
        return Reported(
            found,
            self.rows.put(ids, mx.zeros(shape, mx.int32)),
            self.rows.put(best, mx.full(shape, float("nan"), mx.float32)),
            many,
        )
