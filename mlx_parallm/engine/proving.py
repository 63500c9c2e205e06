"""Compares a model with itself before it serves, in a batch and alone, if no test covers its family."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.forward import Span
from mlx_parallm.batch.kv.cache import KVRow, LoRABatchedKVCache
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.core import DeviceMemory
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.checks import check_adapters, check_offsets
from mlx_parallm.model.families import untried_packages
from mlx_parallm.model.manager import SharedModelManager

_POOL_BYTES, _LONGEST = 1 << 30, 256
"""Of the pool that the checks use: the most memory that it may take, and the longest row in tokens."""

_log = logging.getLogger(__name__)


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
    try:
        _check(manager, runner or _runner(manager, bank))
    except UnsupportedModelError as error:
        if runner is not None:
            raise
        manager.plan = prepare(manager.model, compatible=True)
        _check(manager, _runner(manager, bank))
        _log.warning("%s is served row by row, which is slower with many requests: %s", manager.card.name, error)


def _runner(manager: SharedModelManager, bank: AdapterBank) -> BatchRunner:
    pool = LoRABatchedKVCache(manager.plan.layout, DeviceMemory(_POOL_BYTES), _LONGEST)
    return BatchRunner(manager.model, pool, bank, manager.plan)


def _check(manager: SharedModelManager, runner: BatchRunner) -> None:
    batched = partial(_batched, runner)
    check_offsets(manager.model, batched, manager.card.vocab_size)
    if manager.bank is not None and manager.bank.slots:
        try:
            check_adapters(manager.model, manager.bank, batched, manager.card.vocab_size)
        except UnsupportedModelError as error:
            _log.warning("%s is served without adapters: %s", manager.card.name, error)
            manager.refuse_adapters(f"LoRA on a {manager.family.name} model")


def _batched(
    runner: BatchRunner, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], slots: Sequence[int]
) -> mx.array:
    """Runs prompts and then their continuations as rows of the KV pool. Implements `checks.BatchedForward`."""
    rows = [runner.cache.open(len(p) + len(c)) for p, c in zip(prompts, continuations, strict=True)]
    live = [row for row in rows if row is not None]
    for row, slot in zip(live, slots, strict=True):
        row.adapter_slot = slot
    try:
        for row, prompt in zip(live, prompts, strict=True):
            _compute(runner, [row], prompt)
        return mx.stack([_compute(runner, live, tokens) for tokens in zip(*continuations, strict=True)], axis=1)
    finally:
        for row in live:
            runner.cache.close(row)


def _compute(runner: BatchRunner, rows: Sequence[KVRow], tokens: Sequence[int]) -> mx.array:
    """Computes the next tokens of each row, as many for each, and returns the logits of all."""
    count = len(tokens) // len(rows)
    logits = runner.compute([Span(row, row.computed, count) for row in rows], tokens)
    mx.eval(logits, runner.cache.arrays(), runner.cache.state_arrays())
    for row in rows:
        row.computed += count
    return logits
