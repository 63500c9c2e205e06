"""The default MLX device: its name, its failures, how much memory MLX may use on it, and faster modules for a CPU."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn


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
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    if limit != "max":
        ram = min(ram, int(limit))
    return MachineMemory(ram, int(size) if size else None, mx.metal.is_available())


def memory_limits(
    device: MachineMemory, memory: int | None = None, cache: int | None = None, wire: bool = False
) -> MemoryLimits:
    """The limits for a device. `memory` and `cache` are what the operator configured; None means automatic. `wire`:
    whether memory is wired, if the device can do that."""
    if device.recommended is None:
        most = int(_RAM_SHARE * device.ram)
    else:
        most = device.recommended if device.can_wire else int(_GPU_SHARE * device.recommended)
    memory = memory or most
    automatic_cache = _CPU_CACHE
    if device.recommended is not None:
        automatic_cache = min(max(int(_CACHE_SHARE * memory), _MIN_CACHE), _MAX_CACHE)
    # Metal refuses to wire more than the working set that it recommends.
    wired = min(memory, most) if wire and device.can_wire else None
    return MemoryLimits(memory, min(cache or automatic_cache, memory), wired)


def set_limits(limits: MemoryLimits) -> None:
    """Applies the limits to this process. Call it before a model is loaded. Raises ValueError: too much to wire."""
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)


# -- faster modules for a CPU --------------------------------------------------------------------
#
# Decode on a CPU spends its time on products of a few rows with a large matrix, which OpenBLAS repacks each time, and
# on small element-wise operations. These classes take the place of mlx-lm's on the same arrays, and compute the same
# apart from rounding.


class CPULinear(nn.Linear):  # type: ignore[misc]
    """y = (W xᵀ)ᵀ + b. OpenBLAS packs W a quarter faster in this order than in x Wᵀ."""

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        y: mx.array = (self.weight @ rows.T).T
        if "bias" in self:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], -1)


class Angles:
    """cos and sin of the positions of a pass, which all layers that rotate by the same frequencies share."""

    def __init__(self, dims: int, base: float, scale: float) -> None:
        # The same bits as MLX's own, which rotates what this does not: all tokens of a sequence must agree.
        half = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * (math.log(base) / (dims // 2)))
        self._frequencies, self._scale = mx.concatenate([half, half]), scale
        eye, zero = mx.eye(dims // 2), mx.zeros((dims // 2, dims // 2))
        self.swap = mx.concatenate([mx.concatenate([zero, eye], 1), mx.concatenate([-eye, zero], 1)])
        self._offset: mx.array | None = None
        self._of_offset = (half, half)

    def at(self, offset: mx.array) -> tuple[mx.array, mx.array]:
        """Offsets int [N] → cos and sin, fp32 [N, 1, 1, dims]. Those of the same array are computed once."""
        if self._offset is not offset:
            angles = (offset.astype(mx.float32) * self._scale)[:, None, None, None] * self._frequencies
            self._offset, self._of_offset = offset, (mx.cos(angles), mx.sin(angles))
        return self._of_offset


class CPURoPE(nn.RoPE):  # type: ignore[misc]
    """x cos + (x S) sin, where S swaps (x1, x2) to (-x2, x1): a third of the time of MLX's, for single tokens that each
    have an offset of their own. Others are rotated by MLX."""

    angles: Angles

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """[N, heads, T, head_dim] → the same shape, rotated for the positions from `offset` on."""
        if not isinstance(offset, mx.array) or offset.ndim != 1 or x.shape[2] > 1 or x.shape[-1] != self.dims:
            rotated: mx.array = super().__call__(x, offset)
            return rotated
        cos, sin = self.angles.at(offset)
        return x * cos + (x @ self.angles.swap) * sin


class CPUGatedMLP(nn.Module):  # type: ignore[misc]
    """down(silu(gate(x)) · up(x)). The sigmoid uses `power`, which on MLX's CPU is 2.5 times as fast as `exp`."""

    def __call__(self, x: mx.array) -> mx.array:
        """[..., hidden] → [..., hidden]."""
        gate = self.gate_proj(x)
        y: mx.array = self.down_proj(gate * self.up_proj(x) / (1.0 + mx.power(math.e, -gate)))
        return y


_GATED_MLPS = frozenset(
    f"mlx_lm.models.{family}.MLP" for family in ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
)
"""mlx-lm's MLPs that compute exactly down(silu(gate(x)) · up(x))."""


def adapt_to_cpu(model: nn.Module) -> None:
    """Gives the model's linears, plain rotations and silu-gated MLPs these classes, in place."""
    angles = cache(Angles)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CPULinear
        elif type(module) is nn.RoPE and not module.traditional:
            module.angles = angles(module.dims, module.base, module.scale)
            module.__class__ = CPURoPE
        elif f"{type(module).__module__}.{type(module).__name__}" in _GATED_MLPS:
            module.__class__ = CPUGatedMLP
