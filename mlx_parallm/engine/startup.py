"""Runs the loaded model before the server takes requests: checks that it can be batched, and measures its times."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.batch.forward import Span
from mlx_parallm.batch.kv.cache import KVRow
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.model.families import Support, check_offsets
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.scheduler.cost import CostModel

_SHORT, _LONG, _CONTEXT = 16, 128, 1024
"""Chunk lengths and a context length, in tokens, far enough apart to separate the terms of the cost model."""


def check_unproved(manager: SharedModelManager, runner: BatchRunner) -> None:
    """Checks that a model of an untested family has the same outputs in a batch as alone.

    Two rows of different lengths in the KV pool are compared with their solo runs. A tested family is not checked.

    Raises:
        UnsupportedModelError: the outputs differ, or the model cannot run in a batch.
    """
    if manager.family.support is not Support.TESTED:
        check_offsets(manager.model, lambda *rows: _batched(runner, *rows), manager.card.vocab_size)


def _batched(runner: BatchRunner, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> mx.array:
    """Runs prompts and then their continuations as rows of the KV pool. Implements `families.BatchedForward`."""
    rows = [runner.cache.open(len(p) + len(c)) for p, c in zip(prompts, continuations, strict=True)]
    live = [row for row in rows if row is not None]
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
    mx.eval(logits, runner.cache.arrays())
    for row in rows:
        row.computed += count
    return logits


def calibrate(runner: BatchRunner) -> CostModel:
    """Measures the terms of the cost model, in about a second on a CPU.

    Times three chunks of a prompt, after one to warm up. The content of the context does not change the time, so it is
    not computed: the length of the row is simply set.
    """
    context = min(_CONTEXT, runner.cache.max_length - _LONG)
    if context < _LONG:
        return CostModel()  # so short a context needs no measured model
    _seconds(runner, _SHORT, 0)
    short, long = _seconds(runner, _SHORT, 0), _seconds(runner, _LONG, 0)
    deep = _seconds(runner, _LONG, context)
    per_pair = max(deep - long, 0.0) / (_LONG * context)
    per_token = max(long - short, 1e-6) / (_LONG - _SHORT)
    return CostModel(fixed=max(short - _SHORT * per_token, 1e-4), per_token=per_token, per_pair=per_pair)


def _seconds(runner: BatchRunner, tokens: int, context: int) -> float:
    row = runner.cache.open(context + tokens)
    if row is None:
        return 0.0
    row.computed = context
    try:
        started = time.perf_counter()
        _compute(runner, [row], [0] * tokens)
        return time.perf_counter() - started
    finally:
        runner.cache.close(row)
