"""`mlx_parallm doctor`: reports the device, the BLAS and its speed, the memory, and the bundled model."""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

import mlx_parallm
from mlx_parallm.blas import INSTALL_HINT
from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.model.bundled import bundled_path
from mlx_parallm.model.device import MemoryLimits, device_memory, memory_limits, on_cpu, ram_bytes, recommended_bytes

_SIDE = 1024
_REPEATS = 7
_ENOUGH_GFLOPS = 100.0


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Rates are the median GFLOP/s of a float32 1024³ matrix product, sizes are bytes.

    recommended_bytes: the working set that the device recommends; None on a CPU
    limits: MLX's memory limits in a server without configuration
    bundled_model: its path; None: not installed
    """

    device: str
    mlx_version: str
    mlx_lm_version: str
    blas: str
    matmul_gflops: float
    numpy_gflops: float
    ram_bytes: int
    recommended_bytes: int | None
    limits: MemoryLimits
    bundled_model: str | None
    warnings: tuple[str, ...]

    def render(self) -> str:
        """The report as text, warnings last."""
        recommended = "none" if self.recommended_bytes is None else f"{self.recommended_bytes / 2**30:.1f} GiB"
        facts = {
            "device": self.device,
            "mlx": f"{self.mlx_version}, mlx-lm {self.mlx_lm_version}",
            "BLAS": self.blas,
            f"{_SIDE}³ matmul": f"{self.matmul_gflops:.0f} GFLOP/s (NumPy: {self.numpy_gflops:.0f})",
            "memory": f"{self.ram_bytes / 2**30:.1f} GiB, recommended working set: {recommended}",
            "MLX may take": _limits_text(self.limits),
            "bundled model": self.bundled_model or "not installed",
        }
        lines = [f"{name:<14} {value}" for name, value in facts.items()]
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def _limits_text(limits: MemoryLimits) -> str:
    wired = "none wired" if limits.wired is None else f"{limits.wired / 2**30:.1f} GiB wired"
    return f"{limits.memory / 2**30:.1f} GiB, {limits.cache / 2**20:.0f} MiB of it cached buffers, {wired}"


def report() -> DoctorReport:
    """Makes the report. This takes less than a second with a fast BLAS, and a few seconds with a slow one.

    Do not call it while a device thread works.
    """
    gflops, with_numpy = matmul_gflops(), numpy_gflops()
    model = _bundled_model()
    return DoctorReport(
        device=f"{mx.default_device()}, {mx.device_info().get('device_name', 'unnamed')}",
        mlx_version=importlib.metadata.version("mlx"),
        mlx_lm_version=importlib.metadata.version("mlx-lm"),
        blas=mlx_parallm.BLAS.name,
        matmul_gflops=gflops,
        numpy_gflops=with_numpy,
        ram_bytes=ram_bytes(),
        recommended_bytes=recommended_bytes(),
        limits=memory_limits(device_memory()),
        bundled_model=model if isinstance(model, str) else None,
        warnings=tuple(_warnings(gflops, with_numpy, model)),
    )


def matmul_gflops() -> float:
    """MLX's rate on the default device, in GFLOP/s."""
    left, right = (mx.random.normal((_SIDE, _SIDE), key=mx.random.key(seed)) for seed in (0, 1))
    mx.eval(left, right)
    return _rate(lambda: mx.eval(left @ right))


def numpy_gflops() -> float:
    """NumPy's rate in this process, in GFLOP/s, for comparison."""
    left, right = (np.random.default_rng(seed).random((_SIDE, _SIDE), dtype=np.float32) for seed in (0, 1))
    return _rate(lambda: left @ right)


def is_slow(mlx_gflops: float, numpy_gflops: float) -> bool:
    """Whether a fast BLAS would help: MLX is under 100 GFLOP/s, and under half of NumPy's rate."""
    return mlx_gflops < _ENOUGH_GFLOPS and mlx_gflops < numpy_gflops / 2


def _rate(product: Callable[[], object]) -> float:
    product()  # the first call starts threads
    seconds = [_seconds(product) for _ in range(_REPEATS)]
    return 2 * _SIDE**3 / statistics.median(seconds) / 1e9


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _bundled_model() -> str | ModelNotFoundError:
    try:
        return str(bundled_path())
    except ModelNotFoundError as error:
        return error


def _warnings(mlx_gflops: float, numpy_gflops: float, model: str | ModelNotFoundError) -> list[str]:
    found = []
    if on_cpu() and is_slow(mlx_gflops, numpy_gflops):
        found.append(f"float32 products are slow ({mlx_parallm.BLAS.problem or INSTALL_HINT})")
    if isinstance(model, ModelNotFoundError):
        found.append(str(model))
    return found
