"""Prints what the gated delta rule costs token by token and in chunks, as tables.

python upstream/delta_times.py [--fast-blas]

The sizes are those of one layer of Qwen3-Next (16 heads of keys and 32 of values, 128 numbers each) and of Kimi Linear
(32 heads, and a decay for each number of a key). Times are the least processor time of a few runs, which other programs
disturb less than elapsed time. The BLAS in MLX's wheel for Linux is slow; `--fast-blas` loads OpenBLAS first.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"
if "--fast-blas" in sys.argv:
    from mlx_parallm import blas

    print(blas.preload().name)

from patched import copy_patched  # after the BLAS

FOLDER = tempfile.TemporaryDirectory()
copy_patched(Path(FOLDER.name))
sys.path.insert(0, FOLDER.name)

import mlx.core as mx  # noqa: E402
from mlx_lm.models.gated_delta import gated_delta_chunked, gated_delta_ops  # noqa: E402

Rule = Callable[..., Any]


def inputs(tokens: int, vectorized: bool) -> tuple[mx.array, ...]:
    """q, k, v, g, beta and the state of one layer."""
    key_heads, heads, size = 32 if vectorized else 16, 32, 128
    q, k = mx.random.normal((2, 1, tokens, key_heads, size))
    decay = mx.random.normal((1, tokens, heads, size) if vectorized else (1, tokens, heads))
    arrays = (
        q / mx.linalg.norm(q, axis=-1, keepdims=True),
        k / mx.linalg.norm(k, axis=-1, keepdims=True),
        mx.random.normal((1, tokens, heads, size)),
        mx.exp(-mx.exp(decay - 2)),
        mx.sigmoid(mx.random.normal((1, tokens, heads))),
        mx.random.normal((1, heads, size, size)) / 10,
    )
    mx.eval(arrays)
    return arrays


def cost(rule: Rule, arrays: Sequence[mx.array], runs: int) -> tuple[float, float]:
    """The least processor time in seconds, and the peak memory in MB."""
    times = []
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(runs):
        start = time.process_time()
        mx.eval(rule(*arrays))
        times.append(time.process_time() - start)
    return min(times), (mx.get_peak_memory() - before) / 1e6


def with_gradients(rule: Rule) -> Rule:
    def loss(*arrays: mx.array) -> mx.array:
        return sum(each.sum() for each in rule(*arrays))

    return mx.value_and_grad(loss, argnums=range(6))


def print_table(lengths: Sequence[int], vectorized: bool, gradients: bool) -> None:
    print("| tokens | loop: ms | MB | chunks: ms | MB | times faster |\n|---|---|---|---|---|---|")
    for tokens in lengths:
        arrays = inputs(tokens, vectorized)
        rules = [with_gradients(rule) if gradients else rule for rule in (gated_delta_ops, gated_delta_chunked)]
        (loop, loop_mb), (chunks, chunks_mb) = [cost(rule, arrays, 3 if tokens <= 64 else 2) for rule in rules]
        times = f"| {tokens} | {loop * 1e3:.0f} | {loop_mb:.0f} | {chunks * 1e3:.0f} | {chunks_mb:.0f} "
        print(f"{times}| {loop / chunks:.1f} |", flush=True)


for vectorized in (False, True):
    print("A decay for each number of a key" if vectorized else "A decay for each head")
    print_table((8, 64, 256, 512), vectorized, gradients=False)
    print("With gradients")
    print_table((32, 64, 128), vectorized, gradients=True)
