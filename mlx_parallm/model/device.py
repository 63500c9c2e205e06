"""The default MLX device: its name, its failures, how much memory MLX may use on it, and `mlx_parallm doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import mlx.core as mx
import numpy as np

import mlx_parallm
from mlx_parallm.blas import INSTALL_HINT
from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.machine.processors import BlasThreads
from mlx_parallm.model.bundled import bundled_path


def on_cpu() -> bool:
    """Whether MLX computes on the CPU, where only float32 matrix products are fast."""
    return bool(mx.default_device() == mx.cpu)


def device_name() -> str:
    """The name of the GPU, or CPU."""
    return "CPU" if on_cpu() else str(mx.device_info().get("device_name", "GPU"))


def prepare_device() -> None:
    """Switches `mx.compile` off on a CPU. Call it once, before a model first runs.

    There, MLX would call g++ in the middle of a step, if there is one, and load the result from the shared temporary
    directory. That would save only about 1 % of a step.
    """
    if on_cpu():
        mx.disable_compile()


def check_device() -> None:
    """Waits for all launched work and computes one number. Raises what the device raises."""
    mx.synchronize()
    mx.eval(mx.array([1.0]) + 1.0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the call that raised `error` could not allocate memory for its own result.

    MLX raises a RuntimeError that names its allocator: "[malloc]", "[metal::malloc]", "[cudaMalloc]". A Metal command
    buffer that ran out of memory does not count, because an earlier call launched it.
    """
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "malloc" in str(error).lower())


# -- how much memory MLX may use -----------------------------------------------------------------
#
# On Metal, MLX's defaults let a process take 1.5 times the recommended working set and let it keep as much in freed
# buffers, so that a Mac swaps instead of refusing an allocation. These limits are tighter. Nothing is wired unless the
# operator asks for it: with a wired limit and two busy streams, macOS has panicked within two minutes
# (https://github.com/ml-explore/mlx/issues/3186); without one it has not.

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_RAM_SHARE = 0.8
"""Share of RAM that MLX may take on a CPU, which recommends no working set. It is MLX's own default there."""
_GPU_SHARE = 0.95
"""Share of the memory of a discrete GPU (CUDA), which reports only its size. It is MLX's own default there."""
_CACHE_SHARE = 0.05
_MIN_CACHE, _MAX_CACHE = 256 * 2**20, 4 * 2**30
_CPU_CACHE = 32 * 2**20
"""MLX's own default on a CPU, where freed buffers are cheap to allocate again."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Sizes in bytes.

    ram: the machine's memory, or the container's limit if that is smaller
    recommended: the working set that Metal recommends, the whole memory of another GPU, or None on a CPU
    can_wire: whether memory can be wired, which only Metal does
    """

    ram: int
    recommended: int | None
    can_wire: bool


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Limits for MLX in bytes.

    memory: above it, MLX waits for running work and frees cached buffers before it allocates
    cache: freed buffers that MLX keeps for reuse
    wired: memory kept resident, so that macOS does not page it out between requests; None: MLX's default, which is none
    """

    memory: int
    cache: int
    wired: int | None


def machine_memory() -> MachineMemory:
    """The memory of this machine and of the default device."""
    info = {} if on_cpu() else mx.device_info()
    size = info.get("max_recommended_working_set_size") or info.get("total_memory") or info.get("memory_size")
    return MachineMemory(_ram_bytes(), int(size) if size else None, mx.metal.is_available())


def _ram_bytes() -> int:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return ram if limit == "max" else min(ram, int(limit))


def memory_limits(
    device: MachineMemory, memory: int | None = None, cache: int | None = None, wire: bool = False
) -> MemoryLimits:
    """The limits for a device. `memory` and `cache` are what the operator configured; None means automatic. `wire`:
    whether memory is wired, if the device can do that."""
    most = _usable_bytes(device)
    memory = memory or most
    automatic_cache = _CPU_CACHE
    if device.recommended is not None:
        automatic_cache = min(max(int(_CACHE_SHARE * memory), _MIN_CACHE), _MAX_CACHE)
    # Metal refuses to wire more than the working set that it recommends.
    wired = min(memory, most) if wire and device.can_wire else None
    return MemoryLimits(memory, min(cache or automatic_cache, memory), wired)


def _usable_bytes(device: MachineMemory) -> int:
    if device.recommended is None:
        return int(_RAM_SHARE * device.ram)
    return device.recommended if device.can_wire else int(_GPU_SHARE * device.recommended)


def set_limits(limits: MemoryLimits) -> None:
    """Applies the limits to this process. Call it before a model is loaded. Raises ValueError: too much to wire."""
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)


# -- the report of `mlx_parallm doctor` ----------------------------------------------------------

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


def report(measured: Mapping[str, str] = MappingProxyType({})) -> DeviceReport:
    """Describes the device, the BLAS and its speed, the memory and the bundled model.

    `measured`: further lines by their names.

    It takes less than a second with a fast BLAS, and a few seconds with a slow one. Do not call it while a device
    thread works.
    """
    rates, of_numpy = matmul_rates(), numpy_gflops()
    gflops = max(rates.values())
    warnings = []
    if on_cpu() and is_slow(gflops, of_numpy):
        warnings.append(f"float32 products are slow ({mlx_parallm.BLAS.problem or INSTALL_HINT})")
    try:
        model = str(bundled_path())
    except ModelNotFoundError as error:
        model = "not installed"
        warnings.append(str(error))
    memory = machine_memory()
    recommended = "none" if memory.recommended is None else f"{memory.recommended / 2**30:.1f} GiB"
    facts = {
        "device": f"{mx.default_device()}, {mx.device_info().get('device_name', 'unnamed')}",
        "mlx": f"{importlib.metadata.version('mlx')}, mlx-lm {importlib.metadata.version('mlx-lm')}",
        "BLAS": mlx_parallm.BLAS.name,
        f"{_SIDE}³ matmul": f"{_rates_text(rates)} (NumPy: {of_numpy:.0f})",
        "memory": f"{memory.ram / 2**30:.1f} GiB, recommended working set: {recommended}",
        "MLX may take": _limits_text(memory_limits(memory)),
        **measured,
        "bundled model": model,
    }
    return DeviceReport(facts, tuple(warnings))


def _limits_text(limits: MemoryLimits) -> str:
    wired = "none wired" if limits.wired is None else f"{limits.wired / 2**30:.1f} GiB wired"
    return f"{limits.memory / 2**30:.1f} GiB, {limits.cache / 2**20:.0f} MiB of it cached buffers, {wired}"


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
