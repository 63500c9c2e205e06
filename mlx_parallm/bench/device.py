"""What the device itself does, without a model: memory, launches, products of a few rows, and kinds of attention.

With these, the arithmetic of `benchmarks/step.py` says what a step of a model should take on this machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from mlx_parallm.batch.attention_times import AttentionTimes, typical_times
from mlx_parallm.machine.memory import read_memory
from mlx_parallm.machine.power import read_power
from mlx_parallm.model.device import machine_memory, memory_limits, on_cpu

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_IN, _OUT, _GROUP, _BITS = 4096, 14336, 64, 4
"""Of a matrix of a layer with 8 billion parameters, quantized on a GPU. A CPU serves float32, and a quarter of it."""
_READ_BYTES, _READ_BYTES_ON_CPU = 1 << 30, 1 << 27
_LAUNCHES = 1000
_REPEATS = 5


def device_facts() -> dict[str, Any]:
    """For the report.

    read_bytes_per_s: of a sum over a large array.  launch_s: a small operation that depends on the one before.
    products_s: of a matrix with so many rows, by their number.  attention: milliseconds of a layer, by kind and by
    "rows x tokens"; of the kernel also whether it agrees with the others, or why it fails.
    """
    return {
        "read_bytes_per_s": _read_rate(),
        "launch_s": _launch_seconds(),
        "products_s": _product_seconds(),
        "attention": _attention(),
    }


def state() -> dict[str, Any]:
    """What may slow this machine down now, and the memory that MLX holds. What the system does not say is missing."""
    limits = memory_limits(machine_memory())
    found: dict[str, Any] = {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "cached_bytes": mx.get_cache_memory(),
        "limit_bytes": limits.memory,
        "wired_bytes": limits.wired,
    }
    for read in (lambda: {"pressure": read_memory().pressure.name.lower()}, lambda: asdict(read_power())):
        try:
            found |= read()
        except (OSError, ValueError, AttributeError):
            continue
    return found


def _read_rate() -> float:
    size = _READ_BYTES_ON_CPU if on_cpu() else _READ_BYTES
    array = mx.ones(size // 4, mx.float32)
    mx.eval(array)
    return size / _seconds(lambda: mx.eval(array.sum()))


def _launch_seconds() -> float:
    start = mx.zeros(8)

    def chain() -> None:
        value = start
        for _ in range(_LAUNCHES):
            value = mx.sin(value)
        mx.eval(value)

    return _seconds(chain) / _LAUNCHES


def _product_seconds() -> dict[str, float]:
    dtype, outputs = (mx.float32, _OUT // 4) if on_cpu() else (mx.bfloat16, _OUT)
    weight = mx.random.normal((outputs, _IN)).astype(dtype)
    packed = None if on_cpu() else mx.quantize(weight, _GROUP, _BITS)
    found = {}
    for rows in _ROWS:
        inputs = mx.random.normal((rows, _IN)).astype(dtype)
        mx.eval(inputs, weight if packed is None else packed)

        def product(inputs: mx.array = inputs) -> None:
            if packed is None:
                mx.eval(inputs @ weight.T)
            else:
                mx.eval(mx.quantized_matmul(inputs, *packed, transpose=True, group_size=_GROUP, bits=_BITS))

        found[str(rows)] = _seconds(product)
    return found


def _attention() -> dict[str, Any]:
    times, failure = typical_times()
    kinds = {"dense": times.dense, "by_blocks": times.by_blocks, "kernel": times.kernel}
    columns = {kind: {f"{rows} x {tokens}": ms for (rows, tokens), ms in of.items()} for kind, of in kinds.items()}
    return {**columns, "kernel_difference": _difference(times), "kernel_agrees": times.agrees, "kernel_fails": failure}


def _difference(times: AttentionTimes) -> float | None:
    return times.difference if times.kernel and math.isfinite(times.difference) else None


def _seconds(work: Callable[[], None]) -> float:
    """The median of several, after one that compiles."""
    taken = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])
