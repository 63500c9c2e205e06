"""What MLX may take of the device's memory: the memory limit, the limit of its buffer cache, and what Metal wires.

MLX's own defaults let a process take 1.5 times the recommended working set on Metal, keep as much of it in freed
buffers, and wire nothing: a Mac then swaps instead of refusing.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.model.device import on_cpu, ram_bytes, recommended_bytes

_RAM_SHARE = 0.8
"""Of RAM, where the device recommends no working set (a CPU); MLX's own default there."""
_GPU_SHARE = 0.95
"""Of the memory of a GPU of its own (CUDA), which says its size only; MLX's own default there."""
_CACHE_SHARE = 0.05
_LEAST_CACHE, _MOST_CACHE = 256 * 2**20, 4 * 2**30
_CPU_CACHE = 32 * 2**20
"""MLX's own default on a CPU, where freed buffers are not worth more."""


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Bytes. `recommended`: the working set that Metal recommends, the whole memory of another GPU, None on a CPU.
    `wires`: Metal, which can wire memory."""

    ram: int
    recommended: int | None
    wires: bool


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes.

    memory: above it MLX waits for running work and gives cached buffers back before it allocates.
    cache: freed buffers that MLX keeps to use again.
    wired: kept resident, so that macOS does not page it out between requests; None where that cannot be set.
    """

    memory: int
    cache: int
    wired: int | None


def device_figures() -> DeviceFigures:
    """Of the default device."""
    return DeviceFigures(ram_bytes(), None if on_cpu() else recommended_bytes(), mx.metal.is_available())


def memory_limits(figures: DeviceFigures, memory: int | None = None, cache: int | None = None) -> MemoryLimits:
    """The limits for a device; `memory` and `cache` where the operator set them."""
    most = _most(figures)
    memory = memory or most
    automatic = _CPU_CACHE
    if figures.recommended is not None:
        automatic = min(max(int(_CACHE_SHARE * memory), _LEAST_CACHE), _MOST_CACHE)
    # More than the device recommends cannot be wired: Metal refuses it.
    return MemoryLimits(memory, min(cache or automatic, memory), min(memory, most) if figures.wires else None)


def _most(figures: DeviceFigures) -> int:
    if figures.recommended is None:
        return int(_RAM_SHARE * figures.ram)
    return figures.recommended if figures.wires else int(_GPU_SHARE * figures.recommended)


def set_limits(limits: MemoryLimits) -> None:
    """Sets them in this process, before a model is loaded. Raises ValueError: the system wires less."""
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)
