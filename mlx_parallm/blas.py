"""Gives MLX's Linux CPU build a fast BLAS. A library that is loaded first takes precedence over MLX's own symbols.

MLX's CPU wheel links the reference BLAS (about 6 GFLOP/s for float32). A shared library that is loaded with RTLD_GLOBAL
before `mlx.core` supplies `cblas_sgemm` and the other functions instead. The first of these that can be loaded is used:

1. the file named by MLX_PARALLM_BLAS (the value `none` skips all of them);
2. OpenBLAS from the `ngsolve-openblas` wheel (a dependency on Linux x86-64);
3. OpenBLAS from the system (Debian: libopenblas0-pthread);
4. MKL from the `mkl` wheel or the system.

On macOS nothing is loaded, because MLX uses Accelerate and Metal there.

Idle threads of OpenBLAS wait actively for some 30 ms for their next product, which other programs and this process'
own threads pay for. Here they wait for some 7 ms, for the OpenBLAS of NumPy too. The next product of a pass comes in
that time, also after the attention of many sequences. On a virtual machine, where waking a thread is slow, a step takes
longer if they sleep sooner. Beside other programs fewer threads are used, so their waiting costs these programs little
(`benchmarks/studies/busy.py`).
How many threads are best depends on what other programs leave; see `mlx_parallm.machine.processors`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ENV_VAR = "MLX_PARALLM_BLAS"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""How many threads a BLAS has, said from outside."""
INSTALL_HINT = (
    "no fast BLAS found: float32 matrix products will be 20-50x slower. Install one: "
    "`apt-get install libopenblas0-pthread`, or `pip install mkl`, "
    f"or set {ENV_VAR} to the path of a libopenblas.so"
)


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS in use: its name, whether it is fast, and the problem if it is not.

    set_threads: sets how many threads its products use from now on, in this process; None if this cannot be set, or
        if the environment says how many.
    """

    name: str
    fast: bool
    problem: str = ""
    set_threads: Callable[[int], object] | None = None


def preload() -> Blas:
    """Loads the first BLAS that is found. Never raises, because a slow BLAS still works."""
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "24")  # log2 of the processor cycles; read when it is loaded
    if sys.platform == "darwin":
        return Blas("Accelerate", fast=True)
    if "mlx.core" in sys.modules:
        return Blas("MLX's own", fast=False, problem="mlx.core was imported before mlx_parallm")
    chosen = os.environ.get(ENV_VAR)
    if chosen == "none":
        return Blas("MLX's own", fast=False, problem=f"{ENV_VAR}=none")
    if chosen:
        return _try_load([Path(chosen)])
    return _try_load(_candidates())


def _candidates() -> Iterator[Path]:
    yield from _package_files("ngsolve_openblas", "libopenblas*.so*")
    yield Path("libopenblas.so.0")
    yield from sorted((Path(sys.prefix) / "lib").glob("libmkl_rt.so*"))
    yield Path("libmkl_rt.so")


def _try_load(paths: Iterator[Path] | list[Path]) -> Blas:
    problem = INSTALL_HINT
    for path in paths:
        try:
            library = _load(path)
        except OSError as error:
            problem = f"{INSTALL_HINT} (last tried: {error})"
        else:
            said = any(os.environ.get(name) for name in THREAD_VARIABLES)
            return Blas(path.name, True, "", None if said else getattr(library, "openblas_set_num_threads", None))
    return Blas("MLX's own", fast=False, problem=problem)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if "libgfortran" not in str(error):
            raise
        return _load_with_mlx_gfortran(path)


def _load_with_mlx_gfortran(path: Path) -> ctypes.CDLL:
    """Loads an OpenBLAS that needs `libgfortran.so.5` on a system without that library.

    MLX's wheel contains the library under another name. The OpenBLAS wheel looks for it in its own folder (RPATH
    $ORIGIN), so both are linked into one temporary folder while they are loaded.
    """
    runtime = next(_package_files("mlx_cpu.libs", "libgfortran*.so*"), None)
    if runtime is None:
        raise OSError(f"{path.name} needs libgfortran.so.5, which is not installed")
    ctypes.CDLL(str(runtime))
    with tempfile.TemporaryDirectory(prefix="mlx_parallm_blas_") as folder:
        for name, target in ((path.name, path), ("libgfortran.so.5", runtime)):
            (Path(folder) / name).symlink_to(target)
        return ctypes.CDLL(str(Path(folder) / path.name), mode=ctypes.RTLD_GLOBAL)


def _package_files(package: str, pattern: str) -> Iterator[Path]:
    """Files of an installed package, which is not imported. `mlx_cpu.libs` is a folder, not a package."""
    spec = None if "." in package else importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else [f"{entry}/{package}" for entry in sys.path]
    for folder in folders:
        yield from sorted(Path(folder).glob(pattern))
