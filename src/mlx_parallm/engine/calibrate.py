"""Measures the cost model's terms on this device, with the model that will serve."""

from __future__ import annotations

import time

from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.scheduler.cost import CostModel

_SHORT, _LONG, _CONTEXT = 16, 128, 1024
"""Chunk lengths and a context, in tokens: enough apart to tell the three terms from one another."""


def calibrate(runner: BatchRunner) -> CostModel:
    """Times three prefill chunks on a scratch row (after one to warm up), a second or so on a CPU.

    What the context holds does not matter for time, so the row's length is simply set.
    """
    context = min(_CONTEXT, runner.cache.max_length - _LONG)
    if context < _LONG:
        return CostModel(fixed=0.01, per_token=1e-4, per_pair=1e-8)  # too short a context to need a model
    _seconds(runner, _SHORT, 0)
    short, long = _seconds(runner, _SHORT, 0), _seconds(runner, _LONG, 0)
    deep = _seconds(runner, _LONG, context)
    per_pair = max(deep - long, 0.0) / (_LONG * context)
    per_token = max(long - short, 1e-6) / (_LONG - _SHORT)
    return CostModel(fixed=max(short - _SHORT * per_token, 1e-4), per_token=per_token, per_pair=per_pair)


def _seconds(runner: BatchRunner, tokens: int, context: int) -> float:
    row = runner.cache.allocate(context + tokens)
    if row is None:
        return 0.0
    row.length = context
    try:
        started = time.perf_counter()
        runner.prefill([(row, [0] * tokens)])
        return time.perf_counter() - started
    finally:
        runner.cache.free(row)
