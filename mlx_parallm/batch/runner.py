"""Runs the model over rows of the KV pool: prefill chunks, decode steps and prompt scores.

Prefill computes the keys and values of all prompt tokens except the last one, which is the input of the first decode
step. Therefore every drawn token comes from a decode step, and prefill never runs the vocabulary projection: MLX is
lazy and does not compute logits that are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.attention import FetchingLayerCache, Forward, LayerCache
from mlx_parallm.batch.forwards import DecodeForward, PackedPrefillForward, PrefillForward
from mlx_parallm.batch.kv_cache import LoRABatchedKVCache
from mlx_parallm.batch.rowwise import log_normaliser, token_logprobs, token_ranks, top_logprobs
from mlx_parallm.batch.sampler import RowSampling, Sampled, SamplingPlan, plan_sampling, sample
from mlx_parallm.batch.slab import KVRow
from mlx_parallm.core import TokenLogprob
from mlx_parallm.model.hooks import AttentionStyle


@dataclass(slots=True, eq=False)
class Row:
    """One live sequence on the device.

    `input_token`: the next step's input; None if it is the token that the step in flight draws. `drawn`: tokens drawn
    so far, including the step in flight.
    """

    kv: KVRow
    sampling: RowSampling
    input_token: int | None
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A decode step's forward pass, before its tokens are drawn: rows in batch order, and lazy logits [n, vocab]."""

    rows: tuple[Row, ...]
    logits: mx.array
    plan: SamplingPlan

    @property
    def needs_previous_tokens(self) -> bool:
        """Whether the tokens of the step before must be read back before `draw`, because a row has a grammar."""
        return self.plan.masks is not None


@dataclass(frozen=True, slots=True)
class Step:
    """A launched decode step: its rows in batch order, and their lazy draws."""

    rows: tuple[Row, ...]
    sampled: Sampled


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's token, read back. `logprob` and `sampling_logprob` are None unless the row requested them."""

    token: int
    logprob: TokenLogprob | None
    sampling_logprob: float | None


class BatchRunner:
    """Owns the model and the KV pool. Device thread only.

    Args:
        model: an mlx-lm model.
        cache: the KV pool.
        bank: the adapter bank that the model's adapted linears read. Each row's `adapter_slot` is one of its slots.
        style: whether the pool or the model computes attention, as `install_hook` returns it.
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
        """Drops all rows and arrays. Used after a failed unit, whose arrays may be wrong."""
        self._planned = None
        self.cache.clear()

    # -- prefill ---------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[tuple[KVRow, Sequence[int]]]) -> None:
        """Computes the next tokens of each row and waits until their keys and values are in the pool.

        With the attention hook, rows of different lengths share one forward pass.
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
        """Prefills one row, and returns each target's raw-model logprob (fp32), rank, and the `top` best alternatives.

        `targets[i]` is the token that follows `tokens[i]`.
        """
        logits = self._forward_chunk(row, tokens)[0].astype(mx.float32)
        normaliser = log_normaliser(logits)
        target_ids = mx.array(list(targets), mx.uint32)
        scores, ranks = token_logprobs(logits, target_ids, normaliser), token_ranks(logits, target_ids)
        best = top_logprobs(logits, normaliser) if top else ()
        mx.eval(row.slab.arrays(), scores, ranks, *best)
        tops = [pairs[:top] for pairs in _pairs(*best)] if best else [()] * len(targets)
        entries = zip(targets, _floats(scores), tops, cast(list[int], ranks.tolist()), strict=True)
        return [TokenLogprob(*entry) for entry in entries]

    def _forward_chunk(self, row: KVRow, tokens: Sequence[int]) -> mx.array:
        return self._run(mx.array([list(tokens)]), PrefillForward(row, len(tokens)), [row], [len(tokens)])

    # -- decode ----------------------------------------------------------------------------------

    def begin(self, rows: Sequence[Row], previous: Step | None) -> PendingStep:
        """Builds the forward pass of one decode step, and launches it at once if drawing has to wait.

        Args:
            rows: each has room for one more token in the pool.
            previous: the step in flight. It includes every row whose `input_token` is None.
        """
        order = {id(kv): place for place, kv in enumerate(self.cache.rows())}
        batch = tuple(sorted(rows, key=lambda row: order[id(row.kv)]))
        logits = self._forward_rows([row.kv for row in batch], _inputs(batch, previous))
        pending = PendingStep(batch, logits, self._plan(batch))
        if pending.needs_previous_tokens:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        return pending

    def draw(self, pending: PendingStep) -> Step:
        """Launches the sampling of a step's tokens, and returns without waiting for it.

        If the step `needs_previous_tokens`, they must have been read back.
        """
        rows = pending.rows
        sampled = sample(pending.logits, pending.plan, [row.drawn for row in rows])
        for row in rows:
            row.drawn += 1
            row.input_token = None
        mx.async_eval(sampled.arrays())  # type: ignore[no-untyped-call]
        return Step(rows, sampled)

    def forward(self, rows: Sequence[KVRow], tokens: Sequence[int]) -> mx.array:
        """A decode step without sampling: one token of each row, in pool order → lazy logits [n, vocab]."""
        return self._forward_rows(rows, mx.array(list(tokens), mx.uint32))

    def _forward_rows(self, rows: Sequence[KVRow], inputs: mx.array) -> mx.array:
        return self._run(inputs[:, None], DecodeForward(rows), rows, [1] * len(rows))[:, -1]

    def read(self, step: Step) -> list[Draw]:
        """Waits for a step and returns its rows' draws in the step's order."""
        tokens = cast(list[int], step.sampled.tokens.tolist())
        return [Draw(*each) for each in zip(tokens, _logprobs(step, tokens), _sampling_logprobs(step), strict=True)]

    def _run(self, inputs: mx.array, forward: Forward, rows: Sequence[KVRow], lengths: Sequence[int]) -> mx.array:
        """Runs the model on `lengths` more tokens of each row. Returns lazy logits [B, T, vocab]."""
        with self._bank.forward([row.adapter_slot for row in rows], lengths):
            logits: mx.array = self._model(inputs, cache=self._layer_caches(forward))
        for row, length in zip(rows, lengths, strict=True):
            row.length += length
        return logits

    def _plan(self, batch: tuple[Row, ...]) -> SamplingPlan:
        """The sampling plan, made again only when the batch has changed.

        The key is the rows' sampling options; keeping the rows themselves would keep their slabs alive.
        """
        options = [row.sampling for row in batch]
        if self._planned is None or not _same(self._planned[0], options):
            self._planned = (options, plan_sampling(options, self._vocab_size))
        return self._planned[1]

    def _layer_caches(self, forward: Forward) -> list[LayerCache | FetchingLayerCache]:
        layers = range(len(self.cache.layout.layers))
        if self._style is AttentionStyle.HOOKED:
            return [LayerCache(forward, layer) for layer in layers]
        return [FetchingLayerCache(forward, layer, self._style is AttentionStyle.OWN_GROUPED) for layer in layers]


def _same(before: Sequence[RowSampling], now: Sequence[RowSampling]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))


def _inputs(batch: tuple[Row, ...], previous: Step | None) -> mx.array:
    """The step's input tokens [n], from `previous` or from the host."""
    if previous is not None and previous.rows == batch and all(row.input_token is None for row in batch):
        return previous.sampled.tokens
    known = mx.array([row.input_token or 0 for row in batch], mx.uint32)
    if previous is None:
        return known
    drawn_at = {id(row): i for i, row in enumerate(previous.rows)}
    source = [drawn_at[id(row)] if row.input_token is None else len(previous.rows) + i for i, row in enumerate(batch)]
    return mx.concatenate([previous.sampled.tokens, known])[mx.array(source)]


def _logprobs(step: Step, tokens: Sequence[int]) -> Sequence[TokenLogprob | None]:
    """Raw-model logprobs of each row's token; None in rows that did not request them."""
    sampled = step.sampled
    if sampled.logprobs is None:
        return [None] * len(tokens)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        tops = _pairs(sampled.top_ids, sampled.top_logprobs)
    return [_logprob(*each) for each in zip(step.rows, tokens, _floats(sampled.logprobs), tops, strict=True)]


def _sampling_logprobs(step: Step) -> Sequence[float | None]:
    """Logprobs of each row's token under the distribution that drew it; None in rows that did not request them."""
    if step.sampled.sampling_logprobs is None:
        return [None] * len(step.rows)
    values = _floats(step.sampled.sampling_logprobs)
    return [value if row.sampling.sampling_logprobs else None for row, value in zip(step.rows, values, strict=True)]


def _logprob(row: Row, token: int, value: float, top: tuple[tuple[int, float], ...]) -> TokenLogprob | None:
    count = row.sampling.params.top_logprobs
    return None if count is None else TokenLogprob(token, value, top[:count])


def _pairs(ids: mx.array, logprobs: mx.array) -> list[tuple[tuple[int, float], ...]]:
    """[T, K] ids and logprobs → T tuples of K pairs."""
    rows = zip(cast(list[list[int]], ids.tolist()), cast(list[list[float]], logprobs.tolist()), strict=True)
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in rows]


def _floats(array: mx.array) -> list[float]:
    return cast(list[float], array.tolist())
