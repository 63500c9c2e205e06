"""Runs the model over rows of the KV pool: one forward pass for single tokens and chunks of prompts, then the sampling.

    begin   builds the forward pass, and the logits and pooled hidden states that are asked for
    wait    until the pass before it has ended
    sample  launches the pass, then samples the next token of some rows
    read    copies the tokens and scores of a pass to the host

MLX is lazy: logits that nobody asks for are not computed, and a pass can be built before the tokens of the pass before
it are known. It must not be launched before that pass has ended, though. MLX writes into an array in place only if
nothing else holds it, and a pass in flight holds the keys and values of all rows and cached prefixes: the next one
would write into copies of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.attention import AttentionChoice
from mlx_parallm.batch.block_attention import pairs_work
from mlx_parallm.batch.forward import Forward, KeptGroups
from mlx_parallm.batch.hidden import HiddenStates
from mlx_parallm.batch.sampling import (
    PromptScores,
    RowSampling,
    Sampled,
    SampledToken,
    SamplingPlan,
    plan_sampling,
    sample,
)
from mlx_parallm.batch.spans import Span, in_order
from mlx_parallm.core.requests import Pooling
from mlx_parallm.kv.cache import KVRow, LoRABatchedKVCache
from mlx_parallm.model.cache_plan import CachePlan
from mlx_parallm.model.hooks import answered_by
from mlx_parallm.model.layer_state import Caches
from mlx_parallm.model.split import OutputHead, trunk_of

if TYPE_CHECKING:
    from mlx_parallm.engine.sequence import Sequence


Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PooledParts:
    """What one pass adds to the pooled hidden states of the rows that ask for a vector instead of tokens.

    prompt of 9 tokens, in chunks of 4, 4 and 1:    last   nothing, nothing, the state of token 9
                                                    mean   a sum over 4, a sum over 4, a sum over 1; their sum / 9

    spans: one for each of these rows.  hidden: lazy, float32 [rows, D]: the state of the last token of the prompt, or
    the sum of the states of the span.
    """

    spans: tuple[Span[Sequence], ...]
    hidden: mx.array

    def read(self) -> list[tuple[Span[Sequence], Vector]]:
        """Waits for the array."""
        return list(zip(self.spans, np.array(self.hidden), strict=True))


@dataclass(frozen=True, slots=True)
class Pending:
    """A forward pass, before its tokens are sampled.

    rows: the rows that sample a token, in the order of `logits`; a row with a draft once for each token that it samples
    positions: tokens that each of them has sampled before
    logits: lazy, [n, vocab]
    scores: of the prompt tokens in the pass, with their row and the number of tokens before them
    pooled: of the rows whose hidden states are pooled
    """

    rows: tuple[Sequence, ...]
    positions: tuple[int, ...]
    logits: mx.array | None
    plan: SamplingPlan | None
    scores: tuple[tuple[Sequence, int, PromptScores], ...]
    pooled: PooledParts | None

    @property
    def needs_previous_tokens(self) -> bool:
        """Whether the tokens of the pass before must be read before `sample`, for example for a grammar."""
        return self.plan is not None and self.plan.needs_previous_tokens


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched forward pass: the rows that sample a token, in order, with these tokens, and scores and pooled hidden
    states. It holds no array of the KV pool, because the next pass would copy that array."""

    rows: tuple[Sequence, ...]
    sampled: Sampled | None
    scores: tuple[tuple[Sequence, int, PromptScores], ...]
    pooled: PooledParts | None


class BatchRunner:
    """Owns the model and the KV pool. Device thread only.

    Attributes:
        attention: which calls of attention its passes have.
        hidden: where the trunk's outputs are kept for a prediction head; None if there is none.

    Args:
        model: an mlx-lm model.
        cache: the KV pool.
        bank: the adapter bank that the model's adapted linears read. Each row's `adapter_slot` is one of its slots.
        plan: how the model runs over packed tokens, from `prepare`.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: LoRABatchedKVCache,
        bank: AdapterBank,
        plan: CachePlan,
    ) -> None:
        self.cache = cache
        self.attention = AttentionChoice(0.0 if pairs_work(cache.layout.dtype) else math.inf)
        self.hidden: HiddenStates | None = None
        self._bank = bank
        self._model = model
        self._trunk = trunk_of(model)
        self._head = None if self._trunk is None else OutputHead(model)
        self._plan = plan
        self._expected = Caches(model)
        self._planned: tuple[list[RowSampling], SamplingPlan] | None = None
        self._groups: KeptGroups = {}

    @property
    def pools(self) -> bool:
        """Whether rows may have a `pooling`: the model has a part that ends with hidden states."""
        return self._trunk is not None

    def clear(self) -> None:
        """Drops all rows and arrays. Used after a failed unit, whose arrays may be wrong."""
        self._planned = None
        self._groups.clear()
        self.cache.clear()
        if self.hidden is not None:
            self.hidden.clear()

    # -- one pass --------------------------------------------------------------------------------

    def begin(self, spans: Seq[Span[Sequence]], sampling: Seq[Sequence], previous: Launched | None) -> Pending:
        """Builds a forward pass.

        Args:
            spans: the tokens to compute; each row has room for them.
            sampling: the rows that sample a token after their span, or have their hidden states pooled by then.
            previous: the pass before, if it is not read. It has the token of every row that has one unread token.
        """
        spans = in_order(spans)
        sampled = {id(row) for row in sampling if row.pooling is None}
        counts = [1 + span.row.drafted if id(span.row) in sampled else 0 for span in spans]
        targets = [_targets(span) if span.row.scored else [] for span in spans]
        outputs = self.run_trunk(_inputs(spans, previous), spans)
        if self.hidden is not None:
            self.hidden.add(spans, outputs)
        needed = [len(scored) + count for scored, count in zip(targets, counts, strict=True)]
        logits = self._logits(outputs, spans, needed)
        return self._pending(spans, counts, targets, logits, _pooled(outputs, spans))

    def wait(self) -> None:
        """Waits until the launched passes have ended, and MLX holds none of their arrays any more.

        `mx.eval` of their results would not be enough: on a GPU it returns when they are computed, which is a moment
        before MLX releases the arrays.
        """
        mx.synchronize()

    def launch(self, pending: Pending) -> None:
        """Launches a pass whose tokens cannot be sampled yet, because it `needs_previous_tokens`. `sample` follows."""
        mx.async_eval(pending.logits)  # type: ignore[no-untyped-call]

    def sample(self, pending: Pending) -> Launched:
        """Launches the sampling of a pass' tokens, and the pass if it is not launched yet. Returns without waiting.

        If the pass `needs_previous_tokens`, they must have been read back.
        """
        sampled = None
        if pending.logits is not None and pending.plan is not None:
            sampled = sample(pending.logits, pending.plan, pending.positions)
        arrays = sampled.arrays() if sampled else self.cache.arrays()
        arrays += [array for _, _, scores in pending.scores for array in scores.arrays()]
        arrays += [pending.pooled.hidden] if pending.pooled else []
        arrays += self.hidden.newest() if self.hidden is not None else []
        mx.async_eval(arrays, self.cache.state_arrays())  # type: ignore[no-untyped-call]
        return Launched(pending.rows, sampled, pending.scores, pending.pooled)

    def read(self, launched: Launched) -> list[SampledToken]:
        """The sampled tokens of a pass, one for each of its rows, in order. Waits for the pass if it has not ended."""
        if launched.sampled is None:
            return []
        return launched.sampled.read([row.sampling for row in launched.rows])

    def compute(self, spans: Seq[Span[KVRow]], tokens: Seq[int]) -> mx.array:
        """Builds a pass that samples nothing, and returns lazy logits [N, vocab] after each token.

        Args:
            spans: in the order of `in_order`.
            tokens: the N tokens of all spans.
        """
        outputs = self.run_trunk(mx.array(list(tokens), mx.uint32), spans)
        logits = self._logits(outputs, spans, [span.tokens for span in spans])
        assert logits is not None
        return logits

    def last_logits(self, spans: Seq[Span[KVRow]], tokens: mx.array) -> mx.array:
        """Builds a pass that samples nothing, and returns lazy logits [n, vocab] after the last token of each span.

        Args:
            spans: in the order of `in_order`.
            tokens: the ids of all spans, [N].
        """
        return self.last_outputs(spans, tokens)[1]

    def last_outputs(self, spans: Seq[Span[KVRow]], tokens: mx.array) -> tuple[mx.array, mx.array]:
        """As `last_logits`; the trunk's outputs [n, D] come before the logits."""
        outputs = self.run_trunk(tokens, spans)
        if len(outputs) > len(spans):
            outputs = outputs[mx.array(np.cumsum([span.tokens for span in spans]) - 1)]
        logits = self._logits(outputs, spans, [1] * len(spans))
        assert logits is not None
        return outputs, logits

    # -- parts of a pass -------------------------------------------------------------------------

    def _pending(
        self,
        spans: Seq[Span[Sequence]],
        counts: Seq[int],
        targets: Seq[list[int]],
        logits: mx.array | None,
        pooled: PooledParts | None,
    ) -> Pending:
        """Splits the logits into those of prompt tokens, which come first in each row, and those to sample from.
        `counts`: the tokens that each row samples. `targets`: its prompt tokens that are scored."""
        if logits is None:
            return Pending((), (), None, None, (), pooled)
        sampling = [(span.row, count) for span, count in zip(spans, counts, strict=True) if count]
        rows = tuple(row for row, count in sampling for _ in range(count))
        positions = tuple(row.sampled + number for row, count in sampling for number in range(count))
        scores: list[tuple[Sequence, int, PromptScores]] = []
        if any(targets):
            sampled: list[int] = []  # the logits to sample from
            start = 0
            for span, count, scored in zip(spans, counts, targets, strict=True):
                if scored:
                    part = PromptScores(logits[start : start + len(scored)], scored, span.row.prompt_candidates)
                    scores.append((span.row, _first_target(span), part))
                start += len(scored) + count
                sampled += range(start - count, start)
            logits = logits[mx.array(sampled)] if sampled else None
        options = [each for row, _ in sampling for each in (row.sampling, *row.draft_sampling)]
        plan = self._sampling_plan(options) if rows else None
        return Pending(rows, positions, logits, plan, tuple(scores), pooled)

    def _logits(self, outputs: mx.array, spans: Seq[Span[KVRow]], needed: Seq[int]) -> mx.array | None:
        """Logits after the last tokens of each span, as many as are `needed`. None if there are none."""
        total = sum(needed)
        if not total:
            return None
        if total < len(outputs):
            stops = np.cumsum([span.tokens for span in spans]).tolist()
            wanted = [at for stop, count in zip(stops, needed, strict=True) for at in range(stop - count, stop)]
            outputs = outputs[mx.array(wanted)]
        if self._head is None:
            return outputs
        rows = [(span.row.adapter_slot, count) for span, count in zip(spans, needed, strict=True) if count]
        with self._bank.forward([slot for slot, _ in rows], [count for _, count in rows]):
            return self._head(outputs)

    def run_trunk(self, inputs: mx.array, spans: Seq[Span[KVRow]]) -> mx.array:
        """The trunk's outputs [N, hidden] for tokens [N], or the logits [N, vocab] of a model without a trunk."""
        model = self._model if self._trunk is None else self._trunk
        run = Forward(self.cache, spans, self._bank, self._plan, self.attention, self._groups)
        slots, lengths = [span.row.adapter_slot for span in spans], [span.tokens for span in spans]
        with answered_by(run), self._bank.forward(slots, lengths):
            outputs: mx.array = model(inputs[:, None], cache=self._expected.nested(run.caches()))
        run.finish()
        return outputs.reshape(-1, outputs.shape[-1])

    def _sampling_plan(self, options: list[RowSampling]) -> SamplingPlan:
        """The sampling plan, made again only when the rows have changed.

        The key is the rows' sampling options; keeping the rows themselves would keep their requests alive.
        """
        if self._planned is None or not _same(self._planned[0], options):
            self._planned = (options, plan_sampling(options, self._plan.vocab_size))
        return self._planned[1]


def _same(before: Seq[RowSampling], now: Seq[RowSampling]) -> bool:
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))


def _targets(span: Span[Sequence]) -> list[int]:
    """The prompt tokens that follow the tokens of a span and are to be scored."""
    return span.row.tokens[_first_target(span) : min(span.stop + 1, span.row.prompt_length)]


def _first_target(span: Span[Sequence]) -> int:
    return max(span.start + 1, span.row.scored_from)


def _inputs(spans: Seq[Span[Sequence]], previous: Launched | None) -> mx.array:
    """The pass's input tokens [N]: those that the host knows, and those that `previous` samples."""
    unread = tuple(span.row for span in spans if span.stop > len(span.row.tokens) + span.row.drafted)
    if not unread:
        return mx.array([token for span in spans for token in _known(span)], mx.uint32)
    assert previous is not None
    assert previous.sampled is not None, "a token is unread, and no pass in flight samples it"
    tokens = previous.sampled.tokens
    if unread == previous.rows and len(unread) == sum(span.tokens for span in spans):
        return tokens
    sampled_at = {id(row): index for index, row in enumerate(previous.rows)}
    ids: list[int] = []
    source: list[int] = []  # of each input, among the sampled tokens and, after them, the known ones
    for span in spans:
        known = _known(span)
        source += range(len(tokens) + len(ids), len(tokens) + len(ids) + len(known))
        ids += known
        if len(known) < span.tokens:
            source.append(sampled_at[id(span.row)])
    return mx.concatenate([tokens, mx.array(ids, mx.uint32)])[mx.array(source)]


def _known(span: Span[Sequence]) -> list[int]:
    """The tokens of a span that the host knows: all, or all but the last one."""
    return [*span.row.tokens[span.start : span.stop], *span.row.draft]


def _pooled(hidden: mx.array, spans: Seq[Span[Sequence]]) -> PooledParts | None:
    """Pools the rows of a pass that want it; None if no row has a part here. `hidden`: [N, D] of the tokens of all
    spans."""
    pooled: list[Span[Sequence]] = []
    parts: list[mx.array] = []
    stop = 0
    for span in spans:
        start, stop = stop, stop + span.tokens
        if span.row.pooling is Pooling.MEAN:
            parts.append(hidden[start:stop].astype(mx.float32).sum(axis=0))
        elif span.row.pooling is Pooling.LAST and span.stop == span.row.prompt_length:
            parts.append(hidden[stop - 1].astype(mx.float32))
        else:
            continue
        pooled.append(span)
    return PooledParts(tuple(pooled), mx.stack(parts)) if parts else None
