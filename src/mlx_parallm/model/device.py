"""What the default device means for a model: how its weights are kept, its memory, and whether MLX may compile."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def on_cpu() -> bool:
    """Whether MLX computes on the CPU, where only float32 matrix products are fast."""
    return bool(mx.default_device() == mx.cpu)


def device_name() -> str:
    """What the device calls itself: a GPU's name, or CPU."""
    return "CPU" if on_cpu() else str(mx.device_info().get("device_name", "GPU"))


def prepare_device() -> None:
    """Switches `mx.compile` off on a CPU. Once, before a model first runs.

    There MLX calls g++ in the middle of a step, where it finds one, and loads what it built from the shared
    temporary directory; what that saves is about 1 % of a step.
    """
    if on_cpu():
        mx.disable_compile()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the call that raised `error` found no memory for what it was to make.

    MLX raises a RuntimeError that names its allocator: "[malloc]", "[metal::malloc]", "[cudaMalloc]". A Metal command
    buffer that ran out of memory does not count: it was launched by an earlier call.
    """
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "malloc" in str(error).lower())


def check_device() -> None:
    """Waits for whatever was launched and computes one number. Raises what the device raises."""
    mx.synchronize()
    mx.eval(mx.array([1.0]) + 1.0)


def recommended_bytes() -> int | None:
    """The working set the device recommends, in bytes (Metal says one), else its memory (CUDA); None on a CPU."""
    info = mx.device_info()
    size = info.get("max_recommended_working_set_size") or info.get("total_memory") or info.get("memory_size")
    return int(size) if size else None


def ram_bytes() -> int:
    """The machine's memory, or the container's limit where that is smaller."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return ram if limit == "max" else min(ram, int(limit))
