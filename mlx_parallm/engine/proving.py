"""Compares rows of one batch, with adapters and from cached prefixes, with what a model gives for each alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span, in_order
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.cache_plan import CachePlan, prepare
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

_PASSES = ((3, 0, 0), (1, 40, 0), (1, 70, 0), (1, 1, 1), (1, 1, 5), (0, 1, 1), (1, 1, 1))
"""Tokens of three rows in each pass: chunks beside single tokens, and more than one block of a row."""
_WINDOW = 2048
"""The widest sliding window that rows are made longer than."""
_CACHED, _MORE = 2 * BLOCK_TOKENS, 22
"""Tokens of a cached prefix, and of a row after it."""
_RANK = 2
_POOL_BYTES, _LONGEST = 1 << 30, 4096
"""Of the pool that the checks use: the most memory that it may take, and the longest row in tokens."""

_log = logging.getLogger(__name__)


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
        return self._checked("batch", lambda: self._difference((0, 0, 0), beyond_windows))

    def adapters(self) -> Finding:
        """Rows with two adapters, and one of the base model, in a bank that is empty before and after."""
        return self._checked("adapters", self._difference_with_adapters)

    def prefix(self) -> Finding:
        """A row that goes on from what an equal one has left in the prefix cache."""
        return self._checked("prefix cache", self._difference_after_reuse)

    def _checked(self, check: str, measure: Callable[[], float]) -> Finding:
        return checked(check, self._plan.layout.dtype, measure)

    def _difference_with_adapters(self) -> float:
        slots = min(2, self._bank.slots)
        adapters = [sample_adapter(self._bank.layout, min(_RANK, self._bank.max_rank), seed) for seed in range(slots)]
        if not any(weights.pairs for weights in adapters):
            raise UnsupportedModelError("no linear of this model may have an adapter")
        try:
            for slot, weights in enumerate(adapters, 1):
                for _ in self._bank.write(slot, weights):
                    pass
            used = (1, slots, 0)
            rows = self.rows()
            got = self.logits(rows, used)
            want = [
                logits_alone(self._model, row, self._bank, adapters[slot - 1] if slot else None)
                for row, slot in zip(rows, used, strict=True)
            ]
            return _worst(got, want)
        finally:
            self._bank.clear()

    def _difference(self, slots: Sequence[int], beyond_windows: bool) -> float:
        rows = self.rows(beyond_windows)
        return _worst(self.logits(rows, slots), [logits_alone(self._model, row) for row in rows])

    def rows(self, beyond_windows: bool = False) -> list[list[int]]:
        """The tokens of three rows, for `logits`."""
        lengths = [sum(tokens) for tokens in zip(*_PASSES, strict=True)]
        windows = [spec.window for spec in self._plan.layout.attention.values() if spec.window is not None]
        if beyond_windows:
            lengths[1] = max([lengths[1], *(window + 8 for window in windows if window <= _WINDOW)])
        return [sample_tokens(length, self._plan.vocab_size, 7 + 31 * n) for n, length in enumerate(lengths)]

    def logits(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> list[mx.array]:
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

    def _open(self, ids: Sequence[int], root: str | None = None) -> KVRow:
        row = self._runner.cache.open(len(ids), root, ids)
        if row is None:
            raise MemoryError("the device has no memory for the rows that are compared; lower --kv-cache-memory")
        return row

    def _computed(self, spans: Sequence[Span[KVRow]], ids: Sequence[int]) -> list[mx.array]:
        """Computes the next tokens of some rows, and returns the logits of each."""
        cache, logits = self._runner.cache, self._runner.compute(spans, ids)
        mx.eval(logits, cache.arrays(), cache.state_arrays())
        parts, start = [], 0
        for span in spans:
            parts.append(logits[start : start + span.tokens])
            start, span.row.computed = start + span.tokens, span.stop
        return parts


def _worst(got: Sequence[mx.array], want: Sequence[mx.array]) -> float:
    return max(relative_error(one, other) for one, other in zip(got, want, strict=True))


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
