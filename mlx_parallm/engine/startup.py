"""What is done with a model before a server takes requests: rows of one batch, with adapters and from cached prefixes,
are compared with what the model gives for each alone, and the times of units are measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.batch.attention_times import attention_times
from mlx_parallm.batch.paged_attention import is_proved, obstacle
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span, in_order
from mlx_parallm.config import Attention
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.sequence import PromptGroup, Sequence
from mlx_parallm.engine.speculate import MOST_TOKENS
from mlx_parallm.errors import ConfigError, UnsupportedModelError
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.cache_plan import CachePlan, prepare
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.families import (
    Finding,
    checked,
    logits_alone,
    relative_error,
    sample_adapter,
    sample_tokens,
    untried_packages,
)
from mlx_parallm.model.layer_state import KVLayout
from mlx_parallm.model.manager import SharedModelManager

_log = logging.getLogger(__name__)

# ---- is it right -------------------------------------------------------------------------------

_PASSES = ((3, 0, 0), (1, 40, 0), (1, 70, 0), (1, 1, 1), (1, 1, 5), (0, 1, 1), (1, 1, 1))
"""Tokens of three rows in each pass: chunks beside single tokens, and more than one block of a row."""
_WINDOW = 2048
"""The widest sliding window that rows are made longer than."""
_CACHED, _MORE = 2 * BLOCK_TOKENS, 22
"""Tokens of a cached prefix, and of a row after it."""
_RANK = 2
_POOL_BYTES, _LONGEST = 1 << 30, 4096
"""Of the pool that the checks use: the most memory that it may take, and the longest row in tokens."""


class Prover:
    """Runs a model over a small KV pool of its own, or with the `runner` of ranks that share a model. `layout`: of that
    pool, if it is another one than the plan's."""

    def __init__(
        self,
        model: nn.Module,
        bank: AdapterBank,
        plan: CachePlan,
        runner: BatchRunner | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self._model, self._bank, self._plan = model, bank, plan
        if runner is None:
            pool = LoRABatchedKVCache(layout or plan.layout, DeviceMemory(_POOL_BYTES), _LONGEST)
            runner = BatchRunner(model, pool, bank, plan)
        self._runner = runner

    def batch(self, beyond_windows: bool = False) -> Finding:
        """Rows of the base model. `beyond_windows`: one of them is longer than its sliding windows."""
        rows = self.rows(beyond_windows)
        return self._checked("batch", lambda: self._difference(rows, (0, 0, 0), {}))

    def adapters(self) -> Finding:
        """Rows with two adapters, and one of the base model, in a bank that is empty before and after."""
        return self._checked("adapters", self._difference_with_adapters)

    def prefix(self) -> Finding:
        """A row that goes on from what an equal one has left in the prefix cache."""
        return self._checked("prefix cache", self._difference_after_reuse)

    def _checked(self, check: str, measure: Callable[[], float]) -> Finding:
        return checked(check, self._plan.layout.dtype, measure)

    def _difference_with_adapters(self) -> float:
        slots, rank = range(1, min(2, self._bank.slots) + 1), min(_RANK, self._bank.max_rank)
        adapters = {slot: sample_adapter(self._bank.layout, rank, seed) for seed, slot in enumerate(slots)}
        if not any(weights.pairs for weights in adapters.values()):
            raise UnsupportedModelError("no linear of this model may have an adapter")
        try:
            for slot, weights in adapters.items():
                for _ in self._bank.write(slot, weights):
                    pass
            return self._difference(self.rows(), (1, len(slots), 0), adapters)
        finally:
            self._bank.clear()

    def _difference(self, rows: Seq[list[int]], slots: Seq[int], adapters: Mapping[int, AdapterWeights]) -> float:
        """The largest error of three rows with the adapters in these slots."""
        got = self.logits(rows, slots)
        want = (
            logits_alone(self._model, row, self._bank, adapters.get(at)) for row, at in zip(rows, slots, strict=True)
        )
        return max(relative_error(one, other) for one, other in zip(got, want, strict=True))

    def rows(self, beyond_windows: bool = False) -> list[list[int]]:
        """The tokens of three rows, for `logits`."""
        lengths = [sum(tokens) for tokens in zip(*_PASSES, strict=True)]
        windows = [spec.window for spec in self._plan.layout.attention.values() if spec.window is not None]
        if beyond_windows:
            lengths[1] = max([lengths[1], *(window + 8 for window in windows if window <= _WINDOW)])
        return [sample_tokens(length, self._plan.vocab_size, 7 + 31 * n) for n, length in enumerate(lengths)]

    def logits(self, rows: Seq[Seq[int]], slots: Seq[int]) -> list[mx.array]:
        """Logits [T, vocab] of three rows, computed in `_PASSES`. `slots`: of the bank. What is more of the second row
        comes in its first pass."""
        opened: list[KVRow | None] = [None] * len(rows)
        got: list[list[mx.array]] = [[] for _ in rows]
        more = len(rows[1]) - sum(tokens[1] for tokens in _PASSES)
        try:
            for sizes in _PASSES:
                spans = []
                for number, size in enumerate(sizes):
                    row = opened[number] = opened[number] or (self._open(rows[number]) if size else None)
                    if row is not None and size:
                        row.adapter_slot = slots[number]
                        spans.append(Span(row, row.computed, size + (0 if row.computed or number != 1 else more)))
                spans = in_order(spans)
                numbers = [opened.index(span.row) for span in spans]
                ids = [id for at, span in zip(numbers, spans, strict=True) for id in rows[at][span.start : span.stop]]
                for at, logits in zip(numbers, self._computed(spans, ids), strict=True):
                    got[at].append(logits)
        finally:
            for row in opened:
                if row is not None:
                    self._runner.cache.close(row)
        return [mx.concatenate(each) for each in got]

    def _difference_after_reuse(self) -> float:
        ids, found, got = self.reused()
        if found < BLOCK_TOKENS:
            why = " because the caches of this model are of a class of its own" if self._plan.layout.opaque else ""
            raise UnsupportedModelError(f"of {_CACHED} cached tokens, {found} are found{why}")
        return relative_error(got, logits_alone(self._model, ids)[found:])

    def reused(self) -> tuple[list[int], int, mx.array]:
        """The tokens of a row, how many of them it has from an equal row before it, and the logits of the rest."""
        ids, cache = sample_tokens(_CACHED + _MORE, self._plan.vocab_size), self._runner.cache
        first = self._open(ids, "root")
        for stop in range(BLOCK_TOKENS, _CACHED + 1, BLOCK_TOKENS):
            cache.reserve_checkpoint(first, stop)
            self._computed([Span(first, first.computed, stop - first.computed)], ids[first.computed : stop])
            cache.freeze(first, "root", ids)
        cache.close(first)
        again = self._open(ids, "root")
        found = again.computed
        try:
            return ids, found, self._computed([Span(again, found, len(ids) - found)], ids[found:])[0]
        finally:
            cache.close(again)
            cache.index.drop("root")

    def _open(self, ids: Seq[int], root: str | None = None) -> KVRow:
        row = self._runner.cache.open(len(ids), root, ids)
        if row is None:
            raise MemoryError("the device has no memory for the rows that are compared; lower --kv-cache-memory")
        return row

    def _computed(self, spans: Seq[Span[KVRow]], ids: Seq[int]) -> list[mx.array]:
        """Computes the next tokens of some rows, and returns the logits of each."""
        cache, logits = self._runner.cache, self._runner.compute(spans, ids)
        mx.eval(logits, cache.arrays(), cache.state_arrays())
        parts, start = [], 0
        for span in spans:
            parts.append(logits[start : start + span.tokens])
            start, span.row.computed = start + span.tokens, span.stop
        return parts


def prove(manager: SharedModelManager, bank: AdapterBank, runner: BatchRunner | None = None) -> None:
    """Checks that a model of an untested family has the same outputs in a batch as alone, with adapters too.

    A tested family is checked only with a version of MLX or mlx-lm that was not tried. A model that does not run in a
    batch gets a compatible plan; one that fails with adapters only is served without.

    Args:
        bank: the adapter bank that the model's linears read.
        runner: of a model that is split, the ranks' own; None: the model is whole.

    Raises:
        UnsupportedModelError: the outputs differ, or the model does not run.
    """
    untried = untried_packages()
    if untried:
        _log.info(
            "%s was not tried with this program; the model is compared with itself in a batch", " and ".join(untried)
        )
    elif manager.family.tested:
        return
    found = Prover(manager.model, bank, manager.plan, runner).batch()
    if found.problem and runner is None:
        _log.warning(
            "%s is served row by row, which is slow with many requests: in a batch, %s",
            manager.card.name,
            found.problem,
        )
        manager.plan = prepare(manager.model, compatible=True)
        found = Prover(manager.model, bank, manager.plan).batch()
    if found.problem:
        raise UnsupportedModelError(f"this model cannot be batched: {found.problem}")
    if bank.slots:
        found = Prover(manager.model, bank, manager.plan, runner).adapters()
        if found.problem:
            _log.warning("%s is served without adapters: %s", manager.card.name, found.problem)
            manager.refuse_adapters(f"LoRA on a {manager.family.name} model")


# ---- how long it takes --------------------------------------------------------------------------

_SHORT = 16
_LONG, _CONTEXT = 128, 1024
_LONG_ON_CPU, _CONTEXT_ON_CPU = 64, 512
"""Chunk lengths and a context length, in tokens, far enough apart to separate the terms of the cost model. A CPU's time
grows evenly with the tokens, so fewer do, and its server starts a second earlier."""

_SAMPLING = 8
"""Rows that sample a token together, so that the weights of the output layer are read once for all, as in a step."""

_REPEATS, _LONG_ENOUGH_S = 3, 0.5
"""How often a unit is timed. On a CPU, where nothing is compiled, one is not timed again that has taken long: beside
other programs each takes seconds, and a start should not take minutes."""

_STEPS, _STEPS_ON_CPU = (1, 2, 3, 4, 6, 8, 12, 16, 24, MOST_TOKENS), (1, 2, 4, 8, 16, MOST_TOKENS)
"""Rows whose units are timed, to know what a few rows, and the tokens of drafts, cost. On a GPU more of them, as
the times of quantized products of 2 to 12 rows are uneven (https://github.com/ml-explore/mlx/issues/4265)."""

_UNEVEN = 8
"""Tokens of the unit with which `CostModel.uneven` is measured. One row has two of them."""

Check = Callable[[], None]
"""Raises what ends the measurements early."""


def choose_attention(runner: BatchRunner, wanted: Attention, prover: Prover) -> None:
    """Measures which attention of single tokens is faster on this GPU, and lets the runner use it. Does nothing for a
    model without attention.

    On a CPU, a row alone is a fifth faster with dense keys, and several are not (`doctor` shows it). It is not measured
    there: beside other programs that takes a second, and the kind, and so the rounding, would differ from start to
    start.

    Args:
        prover: of this runner's model, with this runner.

    Raises:
        ConfigError: the kernel is `wanted`, and cannot be used.
    """
    layout = runner.cache.layout
    why_not = obstacle(layout)
    if wanted is Attention.KERNEL and why_not:
        raise ConfigError(f"--attention kernel cannot be used: {why_not}; leave it out")
    if on_cpu():
        runner.attention = replace(runner.attention, dense_rows=max(runner.attention.dense_rows, 1.0))
    elif layout.attention:
        tries_kernel = why_not is None and (wanted is Attention.KERNEL or (wanted is Attention.AUTO and is_proved()))
        times, problem = attention_times(next(iter(layout.attention.values())), layout.dtype, tries_kernel)
        runner.attention = times.choice(times.agrees and (times.is_faster or wanted is Attention.KERNEL))
        if runner.attention.kernel:
            problem = prover.batch().problem
        elif times.kernel and not times.agrees:
            problem = f"a layer's outputs differ by {times.difference:.1e}"
        if problem:
            _log.warning("attention does not use its kernel: %s", problem)
            runner.attention = times.choice(kernel=False)
        _log.debug("attention of single tokens: %s", times.text(runner.attention))
        if wanted is Attention.KERNEL and not runner.attention.kernel:
            raise ConfigError(
                "--attention kernel cannot be used: on this GPU it fails, or does not compute what attention without "
                "it does; leave it out, and report what `mlx_parallm doctor` prints"
            )


def calibrate(runner: BatchRunner, check: Check = lambda: None) -> CostModel:
    """Measures the terms of the cost model of a forward unit, in about a second on a CPU that nothing else uses.

    Times three prefill chunks, and a unit with as many tokens as the shortest that samples the next token of some rows.
    The content of the context does not change the time, so it is not computed: the length of the row is simply set.
    `check` is called between units.

    MLX compiles a kernel for a GPU when it is first used, which takes up to half a minute with CUDA. So each kind of
    unit is run several times, and the least time counts.
    """
    most, context = (_LONG_ON_CPU, _CONTEXT_ON_CPU) if on_cpu() else (_LONG, _CONTEXT)
    context = min(context, runner.cache.max_length - most)
    if context < most or runner.cache.longest_row < max(context + most, _SAMPLING * BLOCK_TOKENS):
        return CostModel()  # rows are too short, or memory is too small, to need a measured model
    rows = [_SHORT // _SAMPLING] * _SAMPLING
    long, deep = _least(runner, check, [most]), _least(runner, check, [most], context)
    short = _least(runner, check, [_SHORT])
    if runner.attention.kernel:  # that of few long rows is compiled now, and not when they come
        _least(runner, check, [1, 1], context)
    sampling_s = _least(runner, check, rows, samples=[1] * _SAMPLING) - short
    per_pair = max(deep - long, 0.0) / (most * context)
    per_token = max(long - short, 1e-6) / (most - _SHORT)
    fixed = max(short - _SHORT * per_token, 1e-4)
    return CostModel(fixed, per_token, per_pair, per_sample=max(sampling_s, 0.0) / _SAMPLING)


def calibrate_steps(runner: BatchRunner, cost: CostModel, check: Check = lambda: None) -> CostModel:
    """Measures units of a token of each of a few rows too, and one in which a row has a draft, in about a second on
    such a CPU. Nothing is measured if there is no memory for these rows."""
    if runner.cache.longest_row < MOST_TOKENS * BLOCK_TOKENS:
        return cost
    counts = _STEPS_ON_CPU if on_cpu() else _STEPS
    drafted = [2, *[1] * (_UNEVEN - 2)]
    try:
        times = [_least(runner, check, [1] * rows, samples=[1] * rows) for rows in counts]
        with_draft = _least(runner, check, drafted, samples=drafted) if runner.cache.layout.takes_drafts else 0.0
    except MemoryError:  # sequences of another base model have it, and this model must load all the same
        return cost
    steps = tuple(zip(counts, accumulate(times, max), strict=True))
    uneven = with_draft - dict(steps)[_UNEVEN]
    return replace(cost, steps=steps, uneven=max(uneven, 0.0), again=not runner.cache.layout.rolls_back)


def _least(runner: BatchRunner, check: Check, chunks: Seq[int], context: int = 0, samples: Seq[int] = ()) -> float:
    """The time of a unit: the least of several, because the machine may do other work too. See `_seconds`."""
    times: list[float] = []
    while len(times) < _REPEATS and not (times and on_cpu() and sum(times) > _LONG_ENOUGH_S):
        times.append(_seconds(runner, check, chunks, context, samples))
    return min(times)


def _seconds(runner: BatchRunner, check: Check, chunks: Seq[int], context: int, samples: Seq[int]) -> float:
    """The time of a unit with a chunk of so many tokens for each of some rows. `samples`: tokens that each samples;
    empty: none."""
    check()
    rows: list[Sequence] = []
    try:
        for tokens in chunks:
            rows.append(_open(runner, context, tokens))
        for row, sampled in zip(rows, samples, strict=False):
            row.drafted = sampled - 1
            row.draft_sampling = [row.sampling] * row.drafted
        spans = [Span(row, context, tokens) for row, tokens in zip(rows, chunks, strict=True)]
        started = time.perf_counter()
        runner.sample(runner.begin(spans, rows if samples else [], None))
        runner.wait()
        return time.perf_counter() - started
    finally:
        for row in rows:
            runner.cache.close(row)


def _open(runner: BatchRunner, context: int, tokens: int) -> Sequence:
    """A row whose context counts as computed. Raises MemoryError if the device has no memory for it."""
    total = context + tokens
    row = Sequence(tokens=[0] * total, max_tokens=1, arrived_at=0.0, group=PromptGroup())
    if runner.cache.open(total, into=row) is None:
        raise MemoryError("the device has no memory for the rows that are timed; lower --kv-cache-memory")
    row.computed = context
    return row
