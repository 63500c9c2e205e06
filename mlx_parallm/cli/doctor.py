"""The report of `mlx_parallm doctor`: the device, the BLAS and its speed, the memory, and what a server would watch."""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

import mlx_parallm
from mlx_parallm.batch.attention_times import typical_attention
from mlx_parallm.blas import INSTALL_HINT
from mlx_parallm.engine.machine_watch import footprint_limit
from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.machine.memory import read_memory
from mlx_parallm.machine.power import read_power
from mlx_parallm.machine.processors import BlasThreads, OtherPrograms, usable_cores
from mlx_parallm.model.bundled import bundled_path
from mlx_parallm.model.device import machine_memory, memory_limits, on_cpu

_SIDE = 1024
"""Rows and columns of the matrices whose product is timed."""
_REPEATS = 7
_ENOUGH_GFLOPS = 100.0


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What `mlx_parallm doctor` finds. `facts`: by their names, in order."""

    facts: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line for each fact; the warnings come last."""
        lines = [f"{name:<14} {value}" for name, value in self.facts.items()]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def report() -> DeviceReport:
    """Measures and describes this machine. It takes less than a second with a fast BLAS, and a few seconds with a slow
    one. Do not call it while a device thread works."""
    rates, of_numpy = matmul_rates(), numpy_gflops()
    warnings = []
    if on_cpu() and is_slow(max(rates.values()), of_numpy):
        warnings.append(f"float32 products are slow ({mlx_parallm.BLAS.problem or INSTALL_HINT})")
    try:
        model = str(bundled_path())
    except ModelNotFoundError as error:
        model = "not installed"
        warnings.append(str(error))
    memory = machine_memory()
    recommended = "none" if memory.recommended is None else f"{memory.recommended / 2**30:.1f} GiB"
    limits = memory_limits(memory)
    cached = f"{limits.cache / 2**20:.0f} MiB of it cached buffers"
    wired = "none wired" if limits.wired is None else f"{limits.wired / 2**30:.1f} GiB wired"
    facts = {
        "device": f"{mx.default_device()}, {mx.device_info().get('device_name', 'unnamed')}",
        "mlx": f"{importlib.metadata.version('mlx')}, mlx-lm {importlib.metadata.version('mlx-lm')}",
        "BLAS": mlx_parallm.BLAS.name,
        f"{_SIDE}³ matmul": f"{_rates_text(rates)} (NumPy: {of_numpy:.0f})",
        "memory": f"{memory.ram / 2**30:.1f} GiB, recommended working set: {recommended}",
        "MLX may take": f"{limits.memory / 2**30:.1f} GiB, {cached}, {wired}",
        "memory guard": _fact(_memory_guard),
        "power": _fact(_power),
        **({"cores": _fact(_cores)} if sys.platform == "linux" else {}),
        "attention": typical_attention(),
        "bundled model": model,
    }
    return DeviceReport(facts, tuple(warnings))


def _fact(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - a system may say anything; the rest of the report is still of use
        return f"cannot be read, so it is not watched: {error!r}"


def _memory_guard() -> str:
    limit, pressure = footprint_limit(None, machine_memory().ram), read_memory().pressure
    return f"acts when a server takes more than {limit / 2**30:.1f} GiB; memory pressure is {pressure.name.lower()} now"


def _cores() -> str:
    return f"other programs use {OtherPrograms().cores():.1f} of {usable_cores()}"


def _power() -> str:
    power = read_power()
    extras = [text for text, on in (("Low Power Mode", power.low_power), ("hot", power.hot)) if on]
    return ", ".join(["battery" if power.on_battery else "mains", *extras])


def matmul_gflops() -> float:
    """MLX's median rate for a float32 1024³ matrix product on the default device, in GFLOP/s."""
    left, right = (mx.random.normal((_SIDE, _SIDE), key=mx.random.key(seed)) for seed in (0, 1))
    mx.eval(left, right)
    return _rate(lambda: mx.eval(left @ right))


def matmul_rates() -> dict[int, float]:
    """`matmul_gflops` by the threads of the BLAS: one, and one for each core; by 0 if their number cannot be set."""
    threads = BlasThreads()
    rates = {}
    for count in dict.fromkeys((1, threads.most) if threads.most else (0,)):
        threads.use(count)
        rates[count] = matmul_gflops()
    return rates


def _rates_text(rates: Mapping[int, float]) -> str:
    threads = {0: "", 1: " with one thread"}
    return ", ".join(f"{rate:.0f} GFLOP/s{threads.get(count, f' with {count}')}" for count, rate in rates.items())


def numpy_gflops() -> float:
    """The same for NumPy, for comparison."""
    left, right = (np.random.default_rng(seed).random((_SIDE, _SIDE), dtype=np.float32) for seed in (0, 1))
    return _rate(lambda: left @ right)


def is_slow(mlx_gflops: float, numpy_gflops: float) -> bool:
    """Whether a fast BLAS would help: MLX is under 100 GFLOP/s, and under half of NumPy's rate."""
    return mlx_gflops < _ENOUGH_GFLOPS and mlx_gflops < numpy_gflops / 2


def _rate(product: Callable[[], object]) -> float:
    product()  # the first call starts threads
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started)
    return 2 * _SIDE**3 / statistics.median(seconds) / 1e9
