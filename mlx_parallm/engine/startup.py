"""Runs the loaded model before the server takes requests, and measures its times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

from mlx_parallm.batch.attention_times import measure_attention
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span
from mlx_parallm.engine.cost import CostModel
from mlx_parallm.engine.sequence import PromptGroup, Sequence
from mlx_parallm.engine.speculation.choosing import MOST_TOKENS
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.device import on_cpu

_SHORT = 16
_LONG, _CONTEXT = 128, 1024
_LONG_ON_CPU, _CONTEXT_ON_CPU = 64, 512
"""Chunk lengths and a context length, in tokens, far enough apart to separate the terms of the cost model. A CPU's time
grows evenly with the tokens, so fewer do, and its server starts a second earlier."""

_DRAWS = 8
"""Rows that draw a token together, so that the output layer's weights, which are read once, are shared as in a step."""

_REPEATS, _LONG_ENOUGH_S = 3, 0.2
"""How often a unit is timed. On a CPU, where nothing is compiled, one that takes long is not timed again: beside other
programs each takes seconds, and a start should not take minutes."""

_STEPS = (1, 2, 4, 8, 16, MOST_TOKENS)
"""Tokens of a row whose units are timed, to know what the tokens of drafts cost."""

Check = Callable[[], None]
"""Raises what ends the measurements early."""

_log = logging.getLogger(__name__)


def choose_attention(runner: BatchRunner) -> None:
    """Measures which attention of single tokens is faster on this GPU, and lets the runner use it. Does nothing for a
    model without attention.

    On a CPU, a row alone is a fifth faster with dense keys, and several are not (`doctor` shows it). It is not measured
    there: beside other programs that takes a second, and the kind, and so the rounding, would differ from start to
    start.
    """
    layout = runner.cache.layout
    if on_cpu():
        runner.dense_rows = max(runner.dense_rows, 1.0)
    elif layout.attention:
        times = measure_attention(next(iter(layout.attention.values())), layout.dtype)
        runner.dense_rows = times.dense_rows
        _log.debug("attention of single tokens: %s", times.text)


def calibrate(runner: BatchRunner, check: Check = lambda: None) -> CostModel:
    """Measures the terms of the cost model of a forward unit, in about a second on a CPU that nothing else uses.

    Times three prefill chunks, and a unit with as many tokens as the shortest that draws the next token of some rows.
    The content of the context does not change the time, so it is not computed: the length of the row is simply set.
    `check` is called between units.

    MLX compiles a kernel for a GPU when it is first used, which takes up to half a minute with CUDA. So each kind of
    unit is run several times, and the least time counts.
    """
    most, context = (_LONG_ON_CPU, _CONTEXT_ON_CPU) if on_cpu() else (_LONG, _CONTEXT)
    context = min(context, runner.cache.max_length - most)
    if context < most or runner.cache.longest_row < max(context + most, _DRAWS * BLOCK_TOKENS):
        return CostModel()  # rows are too short, or memory is too small, to need a measured model
    rows = [_SHORT // _DRAWS] * _DRAWS
    long, deep = _least(runner, check, [most]), _least(runner, check, [most], context)
    short = _least(runner, check, [_SHORT])
    drawing = _least(runner, check, rows, draws=1) - short
    per_pair = max(deep - long, 0.0) / (most * context)
    per_token = max(long - short, 1e-6) / (most - _SHORT)
    fixed = max(short - _SHORT * per_token, 1e-4)
    return CostModel(fixed, per_token, per_pair, per_draw=max(drawing, 0.0) / _DRAWS)


def calibrate_steps(runner: BatchRunner, cost: CostModel, check: Check = lambda: None) -> CostModel:
    """Measures units of a few tokens too, each of which gives a token, in about a second on such a CPU."""
    if runner.cache.longest_row < MOST_TOKENS:
        return cost
    times = [_least(runner, check, [tokens], draws=tokens) for tokens in _STEPS]
    return replace(cost, steps=tuple(zip(_STEPS, accumulate(times, max), strict=True)))


def _least(runner: BatchRunner, check: Check, chunks: Seq[int], context: int = 0, draws: int = 0) -> float:
    """The time of a unit: the least of several, because the machine may do other work too. See `_seconds`."""
    times: list[float] = []
    while len(times) < _REPEATS and not (times and on_cpu() and times[-1] > _LONG_ENOUGH_S):
        times.append(_seconds(runner, check, chunks, context, draws))
    return min(times)


def _seconds(runner: BatchRunner, check: Check, chunks: Seq[int], context: int, draws: int = 0) -> float:
    """The time of a unit with a chunk of so many tokens for each of some rows. `draws`: tokens that each row draws."""
    check()
    rows: list[Sequence] = []
    try:
        for tokens in chunks:
            rows.append(_open(runner, context, tokens))
        for row in rows:
            row.drafted = max(draws - 1, 0)
            row.draft_sampling = [row.sampling] * row.drafted
        spans = [Span(row, context, tokens) for row, tokens in zip(rows, chunks, strict=True)]
        started = time.perf_counter()
        runner.draw(runner.begin(spans, rows if draws else [], None))
        runner.wait()
        return time.perf_counter() - started
    finally:
        for row in rows:
            runner.cache.close(row)


def _open(runner: BatchRunner, context: int, tokens: int) -> Sequence:
    """A row whose context counts as computed. Raises MemoryError if the device has no memory for it."""
    total = context + tokens
    row = Sequence(sequence_id=0, tokens=[0] * total, max_tokens=1, arrived_at=0.0, group=PromptGroup())
    if runner.cache.open(total, into=row) is None:
        raise MemoryError("the device has no memory for the rows that are timed; lower --kv-cache-memory")
    row.computed = context
    return row
