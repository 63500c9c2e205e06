"""Draws one token for every row of a batch in one vectorised pass, with each row's own options.

    raw logits ─ penalties ─ logit_bias, min_tokens ─ allowed tokens, grammar, bad words ─┐
               ┌──────────────────────────────────────────────────────────────────────────┘
               ├─ argmax ──────────────────────────────┬─ tokens
               └─ temperature ─ filters ─ inverse CDF ─┘
    raw logits, or the processed ones that a row draws from ─ logprobs, top logprobs

`plan_sampling` reads the options once per batch composition, and leaves out the stages that no row uses. `sample` only
builds a lazy graph: it evaluates nothing and reads nothing back, so the next forward pass can be launched before the
tokens of this one are known. The exceptions are rows with a grammar or with bad words of several tokens: what they may
draw depends on the token before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.filters import Filters
from mlx_parallm.batch.logit_stages import LogitEdit, LogitEdits, Penalties, TokenCounts, has_penalties
from mlx_parallm.batch.reported_logprobs import COLDEST, Reported, ReportedLogprobs
from mlx_parallm.batch.rowwise import RowSubset, draw, exp, streams, uniforms
from mlx_parallm.batch.token_bans import AllowedTokens, BadWordBans, BadWords, TokenMasks
from mlx_parallm.core import GrammarState, SamplingParams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling options and state of one row, which the row keeps until it ends.

    Attributes:
        params: with the row's own seed.
        end_ids: tokens that cannot be drawn while the row has generated fewer than `min_tokens`.
        sampling_logprobs: return the logprobs of the distribution that draws the tokens.
        counts: exists if `has_penalties(params)`. `sample` adds the tokens that it draws.
        grammar: its state, which accepts each token after the token has been read back.
        bad_words: what it must not write, and its tokens that have been read back.
    """

    params: SamplingParams
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    sampling_logprobs: bool = False
    counts: TokenCounts | None = None
    grammar: GrammarState | None = None
    bad_words: BadWords | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is drawn. top_k = 1 counts as greedy, so the first of several best tokens is drawn."""
        return self.params.temperature < COLDEST or self.params.top_k == 1

    def without_grammar(self) -> RowSampling:
        """The same options without the grammar."""
        return replace(self, grammar=None)

    def counting(self, prompt: Sequence[int], generated: Sequence[int]) -> RowSampling:
        """The same options with counts of these tokens for penalties."""
        assert self.counts is not None
        return replace(self, counts=TokenCounts(prompt, generated, self.counts.vocab_size))

    def along(self, draft: Sequence[int]) -> list[RowSampling]:
        """The options after each token of `draft`, which the grammar allows."""
        if self.counts is None and self.grammar is None and self.bad_words is None:
            return [self] * len(draft)
        options, grammar = list[RowSampling](), self.grammar
        for place, token in enumerate(draft, 1):
            if grammar is not None:
                grammar = grammar.copy()
                grammar.accept(token)
            counts = self.counts.after(draft[:place]) if self.counts is not None else None
            bad_words = self.bad_words.after(draft[:place]) if self.bad_words is not None else None
            options.append(replace(self, counts=counts, grammar=grammar, bad_words=bad_words))
        return options


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The D rows of a batch that are not greedy.

    `numbers`: their numbers in the batch, [D]. `starts`: the starts of their random streams, [D]. `temperature`: fp32
    [D, 1]. `filters`: None if none of them filters.
    """

    rows: RowSubset
    numbers: NDArray[np.int64]
    starts: NDArray[np.uint64]
    temperature: mx.array
    filters: Filters | None


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The stages of one batch composition; None for a stage that no row uses. Valid until a row joins or leaves."""

    rows: int
    penalties: Penalties | None
    edits: LogitEdits | None
    allowed: AllowedTokens | None
    masks: TokenMasks | None
    bad_words: BadWordBans | None
    drawn: DrawnRows | None
    sampling_logprobs: bool
    logprobs: ReportedLogprobs | None

    @property
    def needs_previous_tokens(self) -> bool:
        """Whether tokens can be drawn only after those of the pass before have been read back."""
        return self.masks is not None or (self.bad_words is not None and self.bad_words.needs_previous_tokens)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The draws of one forward pass: lazy arrays with R rows in the plan's order.

    Attributes:
        tokens: uint32 [R].
        sampling_logprobs: fp32 [R], of the drawn token under the distribution that drew it (after penalties, bias,
            temperature and filters). 0 in greedy rows, which draw their token with certainty.
        reported: logprobs under the raw model, or in processed rows under the distribution that drew the token. A row
            uses the first `params.top_logprobs` of the best tokens.
    """

    tokens: mx.array
    sampling_logprobs: mx.array | None = None
    reported: Reported | None = None

    def arrays(self) -> list[mx.array]:
        """The arrays that exist, for `mx.async_eval`."""
        sampling = [] if self.sampling_logprobs is None else [self.sampling_logprobs]
        return [self.tokens, *sampling, *(self.reported.arrays() if self.reported else ())]


def plan_sampling(rows: Sequence[RowSampling], vocab_size: int) -> SamplingPlan:
    """The stages that these rows need. The rows are in the order of the logits' rows."""
    return SamplingPlan(
        rows=len(rows),
        penalties=_plan_penalties(rows),
        edits=_plan_edits(rows),
        allowed=AllowedTokens.of([row.params.allowed_tokens for row in rows], vocab_size),
        masks=_plan_masks(rows, vocab_size),
        bad_words=BadWordBans.of([row.bad_words for row in rows]),
        drawn=_plan_drawn(rows, vocab_size),
        sampling_logprobs=any(row.sampling_logprobs for row in rows),
        logprobs=ReportedLogprobs.of([row.params for row in rows], vocab_size),
    )


def sample(logits: mx.array, plan: SamplingPlan, positions: Sequence[int]) -> Sampled:
    """Draws the next token of every row.

    Args:
        logits: the model's own, [R, V], any float dtype.
        plan: for these rows, in this order.
        positions: tokens that each row has generated so far, [R]. Tokens of launched steps count.

    Raises:
        ValueError: plan, logits and positions disagree in the number of rows.
    """
    if len(positions) != plan.rows or logits.shape[0] != plan.rows:
        raise ValueError(f"a plan of {plan.rows} rows got {len(positions)} positions and logits {logits.shape}")
    at = np.asarray(positions, np.int64)
    raw = logits.astype(mx.float32)
    edited = _edited(raw, plan, at)
    tokens, sampling_logprobs = _choose(edited, plan, at)
    if plan.penalties is not None:
        plan.penalties.count(tokens)
    reported = None if plan.logprobs is None else plan.logprobs.of_tokens(raw, edited, tokens)
    return Sampled(tokens, sampling_logprobs, reported)


def _plan_penalties(rows: Sequence[RowSampling]) -> Penalties | None:
    chosen = [i for i, row in enumerate(rows) if has_penalties(row.params)]
    counts = [rows[i].counts for i in chosen]
    known = [each for each in counts if each is not None]
    if len(known) < len(counts):
        raise ValueError("a row with penalties needs TokenCounts")
    return Penalties([rows[i].params for i in chosen], known, chosen, len(rows)) if chosen else None


def _plan_edits(rows: Sequence[RowSampling]) -> LogitEdits | None:
    edits = [LogitEdit(i, token, value) for i, row in enumerate(rows) for token, value in row.params.logit_bias]
    edits += [
        LogitEdit(i, token, -float("inf"), until=row.min_tokens)
        for i, row in enumerate(rows)
        if row.min_tokens > 0
        for token in row.end_ids
    ]
    return LogitEdits(edits) if edits else None


def _plan_masks(rows: Sequence[RowSampling], vocab_size: int) -> TokenMasks | None:
    states = {i: row.grammar for i, row in enumerate(rows) if row.grammar is not None}
    return TokenMasks(list(states.values()), list(states), len(rows), vocab_size) if states else None


def _plan_drawn(rows: Sequence[RowSampling], vocab_size: int) -> DrawnRows | None:
    numbers = [i for i, row in enumerate(rows) if not row.is_greedy]
    if not numbers:
        return None
    params = [rows[i].params for i in numbers]
    return DrawnRows(
        rows=RowSubset.of(numbers, len(rows)),
        numbers=np.array(numbers, np.int64),
        starts=streams([each.seed for each in params]),
        temperature=mx.array([[each.temperature] for each in params], mx.float32),
        filters=Filters.of(params, vocab_size),
    )


def _edited(logits: mx.array, plan: SamplingPlan, positions: NDArray[np.int64]) -> mx.array:
    if plan.penalties is not None:
        logits = plan.penalties.apply(logits)
    if plan.edits is not None:
        logits = plan.edits.apply(logits, positions)
    if plan.allowed is not None:
        logits = plan.allowed.apply(logits)
    if plan.masks is not None:
        logits = plan.masks.apply(logits)
    if plan.bad_words is not None:
        logits = plan.bad_words.apply(logits)
    return logits


def _choose(logits: mx.array, plan: SamplingPlan, positions: NDArray[np.int64]) -> tuple[mx.array, mx.array | None]:
    """Tokens [R], and their sampling logprobs [R] if requested. In drawn rows, the argmax gives the maximum."""
    best = logits.argmax(-1, keepdims=True)
    tokens = best.squeeze(-1)
    logprobs = mx.zeros(tokens.shape, mx.float32) if plan.sampling_logprobs else None
    if plan.drawn is None:
        return tokens, logprobs
    rows = plan.drawn.rows
    peak = mx.take_along_axis(logits, best, -1)
    drawn, drawn_logprobs = _draw(rows.take(logits), rows.take(peak), plan.drawn, positions)
    if logprobs is not None:
        logprobs = rows.put(drawn_logprobs, logprobs)
    return rows.put(drawn, tokens), logprobs


def _draw(
    logits: mx.array, peak: mx.array, drawn: DrawnRows, positions: NDArray[np.int64]
) -> tuple[mx.array, mx.array]:
    """Logits [D, V] and their row maxima [D, 1] → tokens [D], and logprobs [D] under the distribution drawn from."""
    scaled = (logits - peak) / drawn.temperature
    weights = exp(scaled)
    if drawn.filters is not None:
        weights = drawn.filters.apply(weights)
    u = mx.array(uniforms(drawn.starts, positions[drawn.numbers]))
    tokens, total = draw(weights, u[:, None])
    return tokens, mx.take_along_axis(scaled, tokens[:, None], -1).squeeze(-1) - mx.log(total)
