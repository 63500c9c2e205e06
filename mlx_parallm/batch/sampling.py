"""Samples one token for every row of a batch in one vectorised pass, with each row's own options.

    raw logits ─ stages: penalties ─ logit_bias, min_tokens ─ allowed tokens ─ grammar ─ bad words ─┐
               ┌────────────────────────────────────────────────────────────────────────────────────┘
               ├─ argmax ──────────────────────────────┬─ tokens
               └─ temperature ─ filters ─ inverse CDF ─┘
    raw logits, or the processed ones that a row samples from ─ logprobs, top logprobs

`plan_sampling` reads the options once per batch composition, and leaves out the stages that no row uses. `sample` only
builds a lazy graph: it evaluates nothing and reads nothing back, so the next forward pass can be launched before the
tokens of this one are known. The exceptions are rows with a grammar or with bad words of several tokens: what they may
sample depends on the token before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.distributions import (
    Filters,
    RowSubset,
    exp,
    inverse_cdf,
    log_normaliser,
    streams,
    token_logprobs,
    token_ranks,
    top_logprobs,
    uniforms,
)
from mlx_parallm.core.candidates import TOP_LOGPROBS, ManyCandidates
from mlx_parallm.core.grammar import GrammarState
from mlx_parallm.core.requests import SamplingParams, TokenLogprob

Candidates = Sequence[tuple[int, float]]

COLDEST = 1e-5
"""Temperatures below this are greedy (vLLM's limit)."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling options and state of one row, which the row keeps until it ends.

    Attributes:
        params: with the row's own seed.
        end_ids: tokens that cannot be sampled while the row has generated fewer than `min_tokens`.
        sampling_logprobs: return the logprobs of the distribution that the tokens are sampled from.
        counts: exists if `has_penalties(params)`. `sample` adds the tokens that it samples.
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
        """Whether the argmax is taken. top_k = 1 counts as greedy, so the first of several best tokens is taken."""
        return self.params.temperature < COLDEST or self.params.top_k == 1

    @property
    def needs_previous_tokens(self) -> bool:
        """Whether a token can be sampled only after the one before has been read back."""
        return self.grammar is not None or (self.bad_words is not None and self.bad_words.needs_previous_tokens)

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
        for count, token in enumerate(draft, 1):
            if grammar is not None:
                grammar = grammar.copy()
                grammar.accept(token)
            counts = self.counts.after(draft[:count]) if self.counts is not None else None
            bad_words = self.bad_words.after(draft[:count]) if self.bad_words is not None else None
            options.append(replace(self, counts=counts, grammar=grammar, bad_words=bad_words))
        return options


@dataclass(frozen=True, slots=True)
class RandomRows:
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
    """What one batch composition needs. Valid until a row joins or leaves.

    stages: that change the logits, in order
    penalties: that of them which counts the sampled tokens
    random: None if all rows are greedy
    logprobs: None if no row reports any
    needs_previous_tokens: whether tokens can be sampled only after those of the pass before have been read back
    """

    rows: int
    stages: tuple[Stage, ...]
    penalties: Penalties | None
    random: RandomRows | None
    sampling_logprobs: bool
    logprobs: Report | None
    needs_previous_tokens: bool


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's token, read back. `logprob` and `sampling_logprob` are None unless the row requested them."""

    token: int
    logprob: TokenLogprob | None
    sampling_logprob: float | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of one forward pass: lazy arrays with R rows in the plan's order.

    Attributes:
        tokens: uint32 [R].
        sampling_logprobs: fp32 [R], of the token under the distribution that it was sampled from (after penalties,
            bias, temperature and filters). 0 in greedy rows, which sample their token with certainty.
        reported: logprobs under the raw model, or in processed rows under the distribution that the token was sampled
            from. A row uses the first `params.top_logprobs` of the best tokens.
    """

    tokens: mx.array
    sampling_logprobs: mx.array | None = None
    reported: Reported | None = None

    def arrays(self) -> list[mx.array]:
        """The arrays that exist, for `mx.async_eval`."""
        sampling = [] if self.sampling_logprobs is None else [self.sampling_logprobs]
        return [self.tokens, *sampling, *(self.reported.arrays() if self.reported else ())]

    def read(self, rows: Sequence[RowSampling]) -> list[SampledToken]:
        """Waits for the arrays. `rows`: the options of the pass's rows, in order."""
        tokens = cast(list[int], self.tokens.tolist())
        params = [row.params for row in rows]
        logprobs = [None] * len(rows) if self.reported is None else self.reported.read(tokens, params)
        own = [None] * len(rows) if self.sampling_logprobs is None else _floats(self.sampling_logprobs)
        return [
            SampledToken(token, logprob, value if row.sampling_logprobs else None)
            for row, token, logprob, value in zip(rows, tokens, logprobs, own, strict=True)
        ]


def plan_sampling(rows: Sequence[RowSampling], vocab_size: int) -> SamplingPlan:
    """The stages that these rows need. The rows are in the order of the logits' rows."""
    penalties = _plan_penalties(rows)
    stages = [
        None if penalties is None else penalties.apply,
        _edits(rows),
        _allowed_tokens(rows, vocab_size),
        _grammar_masks(rows, vocab_size),
        _bad_words(rows),
    ]
    return SamplingPlan(
        rows=len(rows),
        stages=tuple(stage for stage in stages if stage is not None),
        penalties=penalties,
        random=_plan_random(rows, vocab_size),
        sampling_logprobs=any(row.sampling_logprobs for row in rows),
        logprobs=plan_report([row.params for row in rows], vocab_size),
        needs_previous_tokens=any(row.needs_previous_tokens for row in rows),
    )


def sample(logits: mx.array, plan: SamplingPlan, positions: Sequence[int]) -> Sampled:
    """Samples the next token of every row.

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
    edited = raw
    for stage in plan.stages:
        edited = stage(edited, at)
    tokens, sampling_logprobs = _choose(edited, plan, at)
    if plan.penalties is not None:
        plan.penalties.count(tokens)
    reported = None if plan.logprobs is None else plan.logprobs(raw, edited, tokens)
    return Sampled(tokens, sampling_logprobs, reported)


def _plan_penalties(rows: Sequence[RowSampling]) -> Penalties | None:
    chosen = [i for i, row in enumerate(rows) if has_penalties(row.params)]
    counts = [rows[i].counts for i in chosen]
    known = [each for each in counts if each is not None]
    if len(known) < len(counts):
        raise ValueError("a row with penalties needs TokenCounts")
    return Penalties([rows[i].params for i in chosen], known, chosen, len(rows)) if chosen else None


def _plan_random(rows: Sequence[RowSampling], vocab_size: int) -> RandomRows | None:
    numbers = [i for i, row in enumerate(rows) if not row.is_greedy]
    if not numbers:
        return None
    params = [rows[i].params for i in numbers]
    return RandomRows(
        rows=RowSubset.of(numbers, len(rows)),
        numbers=np.array(numbers, np.int64),
        starts=streams([each.seed for each in params]),
        temperature=mx.array([[each.temperature] for each in params], mx.float32),
        filters=Filters.of(params, vocab_size),
    )


def _choose(logits: mx.array, plan: SamplingPlan, positions: NDArray[np.int64]) -> tuple[mx.array, mx.array | None]:
    """Tokens [R], and their sampling logprobs [R] if requested. In random rows, the argmax gives the maximum."""
    best = logits.argmax(-1, keepdims=True)
    tokens = best.squeeze(-1)
    logprobs = mx.zeros(tokens.shape, mx.float32) if plan.sampling_logprobs else None
    if plan.random is None:
        return tokens, logprobs
    rows = plan.random.rows
    peak = mx.take_along_axis(logits, best, -1)
    sampled, sampled_logprobs = _sample_random(rows.take(logits), rows.take(peak), plan.random, positions)
    if logprobs is not None:
        logprobs = rows.put(sampled_logprobs, logprobs)
    return rows.put(sampled, tokens), logprobs


def _sample_random(
    logits: mx.array, peak: mx.array, random: RandomRows, positions: NDArray[np.int64]
) -> tuple[mx.array, mx.array]:
    """Logits [D, V] and their row maxima [D, 1] → tokens [D], and logprobs [D] under the distribution sampled from."""
    weights = _weights(logits, peak, random.temperature)
    if random.filters is not None:
        weights = random.filters.apply(weights)
    u = mx.array(uniforms(random.starts, positions[random.numbers]))
    tokens, total = inverse_cdf(weights, u[:, None])
    chosen = mx.take_along_axis(logits, tokens[:, None], -1)
    return tokens, ((chosen - peak) / random.temperature).squeeze(-1) - mx.log(total)


@partial(mx.compile, shapeless=True)
def _weights(logits: mx.array, peak: mx.array, temperature: mx.array) -> mx.array:
    """Unnormalised probabilities, of which the largest is 1."""
    return exp((logits - peak) / temperature)


# ---- stages ------------------------------------------------------------------------------------


Stage = Callable[[mx.array, NDArray[np.int64]], mx.array]
"""Changes the logits of a batch: fp32 [R, V], and the tokens that each row has generated so far, [R] → fp32 [R, V]."""


class TokenCounts:
    """How often a row with penalties has seen each token. The row keeps it from batch to batch.

    The counts live on the device, so a token is counted before its id reaches the host. They start as host data; when
    a plan first includes the row, they become one row of the plan's table, which later plans copy.

    generated: fp32 [V]: how often each token was sampled, including the pass launched last
    """

    generated: Callable[[], mx.array]

    def __init__(self, prompt: Sequence[int], generated: Sequence[int], vocab_size: int) -> None:
        """Token ids must be < vocab_size. `generated` is not empty when a preempted row starts again."""
        self.vocab_size = vocab_size
        self._prompt = np.unique(np.asarray(prompt, np.int64))
        known = np.asarray(generated, np.int64)
        self.generated = lambda: mx.array(np.bincount(known, minlength=vocab_size).astype(np.float32))

    def prompt(self) -> mx.array:
        """bool [V]: tokens of the prompt."""
        seen = np.zeros(self.vocab_size, bool)
        seen[self._prompt] = True
        return mx.array(seen)

    def after(self, tokens: Sequence[int]) -> TokenCounts:
        """The counts of the row if it had sampled these tokens too."""
        following, counts = copy(self), self.generated().at[mx.array(list(tokens))].add(1.0)
        following.generated = lambda: counts
        return following


def has_penalties(params: SamplingParams) -> bool:
    """Whether a row with these options needs `TokenCounts`."""
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


class Penalties:
    """Presence, frequency and repetition penalties of a batch.

    Args:
        params, counts: of the rows with penalties.
        rows: the numbers of these rows in the batch, ascending.
        batch: the number of rows in the batch.
    """

    def __init__(self, params: Sequence[SamplingParams], counts: Sequence[TokenCounts], rows: list[int], batch: int):
        self._rows = RowSubset.of(rows, batch)
        self._indices = mx.arange(len(counts))
        self._presence = _column([p.presence_penalty for p in params], neutral=0.0)
        self._frequency = _column([p.frequency_penalty for p in params], neutral=0.0)
        self._repetition = _column([p.repetition_penalty for p in params], neutral=1.0)
        self._prompt = None if self._repetition is None else mx.stack([each.prompt() for each in counts])
        self._generated = mx.stack([each.generated() for each in counts])
        for index, each in enumerate(counts):
            each.generated = partial(self._generated_by, index)

    def apply(self, logits: mx.array, _positions: NDArray[np.int64]) -> mx.array:
        """See `Stage`; with vLLM's arithmetic in vLLM's order.

        The repetition penalty divides positive and multiplies negative logits of tokens in the prompt or the output.
        Frequency is subtracted once for each occurrence in the output, presence once for each token in the output.
        """
        occurs = self._generated > 0
        x = self._rows.take(logits)
        if self._repetition is not None and self._prompt is not None:
            repeated = mx.maximum(x, 0.0) / self._repetition + mx.minimum(x, 0.0) * self._repetition
            x = mx.where(self._prompt | occurs, repeated, x)
        if self._frequency is not None:
            x = x - self._frequency * self._generated
        if self._presence is not None:
            x = x - self._presence * occurs
        return self._rows.put(x, logits)

    def count(self, tokens: mx.array) -> None:
        """Counts the batch's sampled tokens, uint32 [R], each in its own row, with one scatter."""
        sampled = self._rows.take(tokens)
        self._generated = self._generated.at[self._indices, sampled].add(1.0)

    def _generated_by(self, index: int) -> mx.array:
        return self._generated[index]


def _column(values: list[float], neutral: float) -> mx.array | None:
    """fp32 [P, 1], or None if every value is neutral."""
    return mx.array(values, mx.float32)[:, None] if any(value != neutral for value in values) else None


def _edits(rows: Sequence[RowSampling]) -> Stage | None:
    """The stage that adds `logit_bias`, and -inf to end tokens before `min_tokens`, with one scatter. Edits of the same
    token add up."""
    edits = [(i, token, value, math.inf) for i, row in enumerate(rows) for token, value in row.params.logit_bias]
    edits += [
        (i, token, -math.inf, row.min_tokens)
        for i, row in enumerate(rows)
        if row.min_tokens > 0
        for token in row.end_ids
    ]
    if not edits:
        return None
    numbers, tokens, values, until = map(np.array, zip(*edits, strict=True))
    at = mx.array(numbers, mx.int32), mx.array(tokens, mx.int32)

    def apply(logits: mx.array, positions: NDArray[np.int64]) -> mx.array:
        live = positions[numbers] < until
        return logits.at[at].add(mx.array(np.where(live, values, 0).astype(np.float32))) if live.any() else logits

    return apply


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIAS_OF_BYTE = np.where(_BITS, 0, -np.inf).astype(np.float32)
"""[256, 8]: the bias of eight tokens for each value of a mask's byte, 0 for a set bit and -inf for a clear one."""


def _biased(logits: mx.array, masks: NDArray[np.uint8]) -> mx.array:
    """fp32 [n, V] → fp32 [n, V], -inf for tokens whose bit of `masks`, [n, ceil(V / 8)] or wider, is clear."""
    bias = mx.array(_BIAS_OF_BYTE)[mx.array(masks)].flatten(1)
    return logits + bias[:, : logits.shape[-1]]


def _allowed_tokens(rows: Sequence[RowSampling], vocab_size: int) -> Stage | None:
    """The stage for rows that may sample only some tokens, the same ones at each position; see
    `SamplingParams.allowed_tokens`."""
    masks = {i: row.params.allowed_tokens for i, row in enumerate(rows) if row.params.allowed_tokens}
    if not masks:
        return None
    subset, size = RowSubset.of(list(masks), len(rows)), -(-vocab_size // 8)
    bits = np.stack([np.frombuffer(mask, np.uint8, count=size) for mask in masks.values()])
    return lambda logits, _positions: subset.put(_biased(subset.take(logits), bits), logits)


def _grammar_masks(rows: Sequence[RowSampling], vocab_size: int) -> Stage | None:
    """The stage for rows with grammars, whose masks the host computes for every token. By then, each grammar must have
    accepted every token of its row."""
    states = {i: row.grammar for i, row in enumerate(rows) if row.grammar is not None}
    subset = RowSubset.of(list(states), len(rows))

    def apply(logits: mx.array, _positions: NDArray[np.int64]) -> mx.array:
        words = np.zeros((len(states), -(-vocab_size // 32)), "<u4")
        for state, mask in zip(states.values(), words, strict=True):
            state.fill(mask.data)
        return subset.put(_biased(subset.take(logits), words.view(np.uint8)), logits)

    return apply if states else None


class BadWords:
    """The token sequences that a row must not write.

    Args:
        words: none of them empty.
        tokens: the row's own list, which has its prompt and every token that has been read back.
        prompt_length: only what comes after the prompt counts.
    """

    __slots__ = ("_by_end", "_prompt_length", "_single", "_tokens", "needs_previous_tokens")

    def __init__(self, words: Sequence[tuple[int, ...]], tokens: Sequence[int], prompt_length: int) -> None:
        self._tokens = tokens
        self._prompt_length = prompt_length
        self._single = {word[0] for word in words if len(word) == 1}
        self._by_end: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._by_end[word[-2]].append(word)
        self.needs_previous_tokens = bool(self._by_end)

    def after(self, tokens: Sequence[int]) -> BadWords:
        """The bad words of the row if it had sampled these tokens too."""
        following = copy(self)
        longest = max((len(word) for words in self._by_end.values() for word in words), default=0)
        first = max(self._prompt_length, len(self._tokens) - longest)
        following._tokens, following._prompt_length = [*self._tokens[first:], *tokens], 0
        return following

    def banned(self) -> set[int]:
        """The tokens that would complete a word now."""
        written = self._tokens
        if len(written) <= self._prompt_length:
            return self._single
        return self._single.union(
            word[-1] for word in self._by_end.get(written[-1], ()) if self._ends_with(list(word[:-1]))
        )

    def _ends_with(self, beginning: list[int]) -> bool:
        start = len(self._tokens) - len(beginning)
        return start >= self._prompt_length and self._tokens[start:] == beginning


def _bad_words(rows: Sequence[RowSampling]) -> Stage | None:
    """The stage for rows with bad words: -inf for tokens that would complete one. A row that could sample nothing else
    may sample them after all."""
    words = {i: row.bad_words for i, row in enumerate(rows) if row.bad_words is not None}
    subset = RowSubset.of(list(words), len(rows))

    def apply(logits: mx.array, _positions: NDArray[np.int64]) -> mx.array:
        bans = [(index, token) for index, each in enumerate(words.values()) for token in sorted(each.banned())]
        if not bans:
            return logits
        before = subset.take(logits)
        indices, tokens = np.array(bans, np.int32).T
        after = before.at[mx.array(indices), mx.array(tokens)].add(-mx.inf)
        any_left = after.max(-1, keepdims=True) > -mx.inf
        return subset.put(mx.where(any_left, after, before), logits)

    return apply if words else None


# ---- logprobs of sampled tokens -----------------------------------------------------------------


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
            for each, token, value, top in zip(params, tokens, _floats(self.logprobs), tops, strict=True)
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


# ---- logprobs of prompt tokens ------------------------------------------------------------------


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
        return [TokenLogprob(*each) for each in zip(self._targets, _floats(self._scores), tops, ranks, strict=True)]


def _candidates(ids: mx.array, logprobs: mx.array) -> list[Candidates]:
    """[T, K] ids and logprobs → T times K candidates."""
    if ids.shape[-1] > TOP_LOGPROBS:
        arrays = zip(np.array(ids, np.int32), np.array(logprobs, np.float32), strict=True)
        return [ManyCandidates.of_bytes(row_ids.tobytes(), row_values.tobytes()) for row_ids, row_values in arrays]
    rows = zip(cast(list[list[int]], ids.tolist()), cast(list[list[float]], logprobs.tolist()), strict=True)
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in rows]


def _floats(array: mx.array) -> list[float]:
    return cast(list[float], array.tolist())
