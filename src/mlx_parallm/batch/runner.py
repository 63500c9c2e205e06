"""Runs the model over the pool's rows: prefill chunks, decode steps, prompt scores.

Prefill computes keys and values of all but a prompt's last token; that one is the first decode step's
input. So every drawn token comes out of a decode step, and a prefill chunk never runs the vocabulary
projection (MLX is lazy: logits that nobody asks for are not computed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.decode import DecodeForward
from mlx_parallm.batch.kv_cache import LoRABatchedKVCache
from mlx_parallm.batch.logprobs import log_normaliser, token_logprobs, token_ranks, top_logprobs
from mlx_parallm.batch.prefill import PackedPrefillForward, PrefillForward
from mlx_parallm.batch.sampler import RowSampling, Sampled, SamplingPlan, plan_sampling, sample
from mlx_parallm.batch.slab import KVRow
from mlx_parallm.batch.views import FetchingLayerCache, Forward, LayerCache
from mlx_parallm.core import TokenLogprob
from mlx_parallm.model.attention import AttentionStyle


@dataclass(slots=True, eq=False)
class Row:
    """One live sequence on the device.

    `input_token`: the next step's input when the host knows it; None when it is the token that the
    step in flight draws. `drawn`: draws launched so far, the index of the next one.
    """

    kv: KVRow
    sampling: RowSampling
    input_token: int | None
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class Undrawn:
    """A decode forward that nothing has been drawn from: its rows in batch order, logits [n, vocab] (lazy).

    `waits`: a row's grammar has to know the tokens of the step before.
    """

    rows: tuple[Row, ...]
    logits: mx.array
    plan: SamplingPlan

    @property
    def waits(self) -> bool:
        return self.plan.masks is not None


@dataclass(frozen=True, slots=True)
class Step:
    """A launched decode step: its rows in batch order, and what they will have drawn (lazy)."""

    rows: tuple[Row, ...]
    sampled: Sampled


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's token, read back. `logprob` and `sampling_logprob` are None unless the row asked for them."""

    token: int
    logprob: TokenLogprob | None
    sampling_logprob: float | None


class BatchRunner:
    """Owns the model and the KV pool. Device thread only.

    Args:
        model: an mlx-lm model.
        cache: the pool; `runner.cache` is the only way to it.
        bank: of the model's adapted linears; each row's `adapter_slot` is a slot of it.
        style: who computes attention, of `install_hook`.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: LoRABatchedKVCache,
        bank: AdapterBank,
        style: AttentionStyle,
        vocab_size: int,
    ) -> None:
        self.cache = cache
        self._bank = bank
        self._model = model
        self._style = style
        self._vocab_size = vocab_size
        self._planned: tuple[list[RowSampling], SamplingPlan] | None = None

    def clear(self) -> None:
        """Forgets every row and array. For use after a failed unit, whose arrays cannot be trusted."""
        self._planned = None
        self.cache.clear()

    # -- prefill ---------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[tuple[KVRow, Sequence[int]]]) -> None:
        """Computes the next tokens of each row and waits until they are in the pool.

        One forward for all of them, where the attention hook lets rows of different lengths share one.
        """
        if len(chunks) > 1 and self._style is AttentionStyle.HOOKED:
            self._forward_packed(chunks)
        else:
            for row, tokens in chunks:
                self._forward_chunk(row, tokens)
        mx.eval([row.slab.arrays() for row, _ in chunks])

    def _forward_packed(self, chunks: Sequence[tuple[KVRow, Sequence[int]]]) -> None:
        forward = PackedPrefillForward([PrefillForward(row, len(tokens)) for row, tokens in chunks])
        inputs = mx.array([[token] for _, tokens in chunks for token in tokens])
        self._run(inputs, forward, [row for row, _ in chunks], [len(tokens) for _, tokens in chunks])

    def score(self, row: KVRow, tokens: Sequence[int], targets: Sequence[int], top: int) -> list[TokenLogprob]:
        """Prefill of one row that also returns each target's raw-model logprob, fp32, its rank and the `top` best.

        `targets[i]` is the token that follows `tokens[i]`.
        """
        logits = self._forward_chunk(row, tokens)[0].astype(mx.float32)
        normaliser = log_normaliser(logits)
        wanted = mx.array(list(targets), mx.uint32)
        scores, ranks = token_logprobs(logits, wanted, normaliser), token_ranks(logits, wanted)
        best = top_logprobs(logits, normaliser) if top else ()
        mx.eval(row.slab.arrays(), scores, ranks, *best)
        tops = [pairs[:top] for pairs in _pairs(*best)] if best else [()] * len(targets)
        places = cast(list[int], ranks.tolist())
        return [TokenLogprob(*entry) for entry in zip(targets, _floats(scores), tops, places, strict=True)]

    def _forward_chunk(self, row: KVRow, tokens: Sequence[int]) -> mx.array:
        return self._run(mx.array([list(tokens)]), PrefillForward(row, len(tokens)), [row], [len(tokens)])

    # -- decode ----------------------------------------------------------------------------------

    def begin(self, rows: Sequence[Row], previous: Step | None) -> Undrawn:
        """The forward of one decode step; where drawing has to wait, it is started at once.

        Every row has room for one more token in the pool. A row whose input is the step in flight's
        draw must be a row of `previous`.
        """
        order = {id(kv): place for place, kv in enumerate(self.cache.rows())}
        batch = tuple(sorted(rows, key=lambda row: order[id(row.kv)]))
        logits = self._forward_rows([row.kv for row in batch], _inputs(batch, previous))
        undrawn = Undrawn(batch, logits, self._plan(batch))
        if undrawn.waits:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        return undrawn

    def draw(self, undrawn: Undrawn) -> Step:
        """Starts the drawing of its tokens and returns without waiting for it. What it `waits` for was read back."""
        rows = undrawn.rows
        sampled = sample(undrawn.logits, undrawn.plan, [row.drawn for row in rows])
        for row in rows:
            row.drawn += 1
            row.input_token = None
        mx.async_eval(sampled.arrays())  # type: ignore[no-untyped-call]
        return Step(rows, sampled)

    def forward(self, rows: Sequence[KVRow], tokens: Sequence[int]) -> mx.array:
        """One token of each row (in pool order): logits [n, vocab], lazy. What a decode step computes, unsampled."""
        return self._forward_rows(rows, mx.array(list(tokens), mx.uint32))

    def _forward_rows(self, rows: Sequence[KVRow], inputs: mx.array) -> mx.array:
        return self._run(inputs[:, None], DecodeForward(rows), rows, [1] * len(rows))[:, -1]

    def read(self, step: Step) -> list[Draw]:
        """Waits for a step and returns its rows' draws, in the step's order."""
        tokens = cast(list[int], step.sampled.tokens.tolist())
        return [Draw(*each) for each in zip(tokens, _logprobs(step, tokens), _sampling_logprobs(step), strict=True)]

    def _run(self, inputs: mx.array, forward: Forward, rows: Sequence[KVRow], lengths: Sequence[int]) -> mx.array:
        """One forward of the model: `lengths` more tokens of each row. Logits [B, T, vocab], lazy."""
        with self._bank.forward([row.adapter_slot for row in rows], lengths):
            logits: mx.array = self._model(inputs, cache=self._layer_caches(forward))
        for row, length in zip(rows, lengths, strict=True):
            row.length += length
        return logits

    def _plan(self, batch: tuple[Row, ...]) -> SamplingPlan:
        """The last one while the batch is the same. Rows themselves are not kept: they would keep their slabs."""
        wanted = [row.sampling for row in batch]
        if self._planned is None or not _same(self._planned[0], wanted):
            self._planned = (wanted, plan_sampling(wanted, self._vocab_size))
        return self._planned[1]

    def _layer_caches(self, forward: Forward) -> list[LayerCache | FetchingLayerCache]:
        layers = range(len(self.cache.layout.layers))
        if self._style is AttentionStyle.HOOKED:
            return [LayerCache(forward, layer) for layer in layers]
        return [FetchingLayerCache(forward, layer, self._style is AttentionStyle.OWN_GROUPED) for layer in layers]


def _same(before: Sequence[RowSampling], now: Sequence[RowSampling]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))


def _inputs(batch: tuple[Row, ...], previous: Step | None) -> mx.array:
    """The step's input tokens [n]: drawn by `previous`, or known to the host."""
    if previous is not None and previous.rows == batch and all(row.input_token is None for row in batch):
        return previous.sampled.tokens
    known = mx.array([row.input_token or 0 for row in batch], mx.uint32)
    if previous is None:
        return known
    drawn_at = {id(row): i for i, row in enumerate(previous.rows)}
    source = [drawn_at[id(row)] if row.input_token is None else len(previous.rows) + i for i, row in enumerate(batch)]
    return mx.concatenate([previous.sampled.tokens, known])[mx.array(source)]


def _logprobs(step: Step, tokens: Sequence[int]) -> Sequence[TokenLogprob | None]:
    """Of each row's token under the raw model; None in rows that did not ask."""
    sampled = step.sampled
    if sampled.logprobs is None:
        return [None] * len(tokens)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        tops = _pairs(sampled.top_ids, sampled.top_logprobs)
    return [_logprob(*each) for each in zip(step.rows, tokens, _floats(sampled.logprobs), tops, strict=True)]


def _sampling_logprobs(step: Step) -> Sequence[float | None]:
    """Of each row's token under the distribution that drew it; None in rows that did not ask."""
    if step.sampled.sampling_logprobs is None:
        return [None] * len(step.rows)
    values = _floats(step.sampled.sampling_logprobs)
    return [value if row.sampling.sampling_logprobs else None for row, value in zip(step.rows, values, strict=True)]


def _logprob(row: Row, token: int, value: float, top: tuple[tuple[int, float], ...]) -> TokenLogprob | None:
    asked = row.sampling.params.top_logprobs
    return None if asked is None else TokenLogprob(token, value, top[:asked])


def _pairs(ids: mx.array, logprobs: mx.array) -> list[tuple[tuple[int, float], ...]]:
    """[T, K] ids and logprobs → T tuples of K pairs."""
    rows = zip(cast(list[list[int]], ids.tolist()), cast(list[list[float]], logprobs.tolist()), strict=True)
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in rows]


def _floats(array: mx.array) -> list[float]:
    return cast(list[float], array.tolist())
