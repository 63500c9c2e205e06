"""The default MLX device: its name, its memory, how much of it MLX may use, and how to recognise its failures.

On Metal, MLX's defaults let a process take 1.5 times the recommended working set, let it keep as much in freed buffers,
and wire nothing, so that a Mac swaps instead of refusing an allocation. `memory_limits` computes tighter limits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_RAM_SHARE = 0.8
"""Share of RAM that MLX may take on a CPU, which recommends no working set. It is MLX's own default there."""
_GPU_SHARE = 0.95
"""Share of the memory of a discrete GPU (CUDA), which reports only its size. It is MLX's own default there."""
_CACHE_SHARE = 0.05
_MIN_CACHE, _MAX_CACHE = 256 * 2**20, 4 * 2**30
_CPU_CACHE = 32 * 2**20
"""MLX's own default on a CPU, where freed buffers are cheap to allocate again."""


def on_cpu() -> bool:
    """Whether MLX computes on the CPU, where only float32 matrix products are fast."""
    return bool(mx.default_device() == mx.cpu)


def device_name() -> str:
    """The name of the GPU, or CPU."""
    return "CPU" if on_cpu() else str(mx.device_info().get("device_name", "GPU"))


def prepare_device() -> None:
    """Switches `mx.compile` off on a CPU. Call it once, before a model first runs.

    On a CPU, MLX would call g++ in the middle of a step, if there is one, and load the result from the shared temporary
    directory, to save about 1 % of a step.
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


def recommended_bytes() -> int | None:
    """The working set that Metal recommends, or the memory of another GPU, in bytes; None on a CPU."""
    info = mx.device_info()
    size = info.get("max_recommended_working_set_size") or info.get("total_memory") or info.get("memory_size")
    return int(size) if size else None


def ram_bytes() -> int:
    """The machine's memory in bytes, or the container's limit if that is smaller."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return ram if limit == "max" else min(ram, int(limit))


# -- what MLX may take ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Sizes in bytes.

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
    wired: memory kept resident, so that macOS does not page it out between requests; None if it cannot be set
    """

    memory: int
    cache: int
    wired: int | None


def device_memory() -> DeviceMemory:
    """The memory of the default device."""
    return DeviceMemory(ram_bytes(), None if on_cpu() else recommended_bytes(), mx.metal.is_available())


def memory_limits(device: DeviceMemory, memory: int | None = None, cache: int | None = None) -> MemoryLimits:
    """The limits for a device. `memory` and `cache` are what the operator configured; None means automatic."""
    most = _usable_bytes(device)
    memory = memory or most
    automatic_cache = _CPU_CACHE
    if device.recommended is not None:
        automatic_cache = min(max(int(_CACHE_SHARE * memory), _MIN_CACHE), _MAX_CACHE)
    # Metal refuses to wire more than the working set that it recommends.
    return MemoryLimits(memory, min(cache or automatic_cache, memory), min(memory, most) if device.can_wire else None)


def _usable_bytes(device: DeviceMemory) -> int:
    if device.recommended is None:
        return int(_RAM_SHARE * device.ram)
    return device.recommended if device.can_wire else int(_GPU_SHARE * device.recommended)


def set_limits(limits: MemoryLimits) -> None:
    """Applies the limits to this process. Call it before a model is loaded. Raises ValueError: too much to wire."""
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)
