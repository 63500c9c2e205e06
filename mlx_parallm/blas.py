"""Gives MLX's Linux CPU build a fast BLAS. A library that is loaded first takes precedence over MLX's own symbols.

MLX's CPU wheel links the reference BLAS (about 6 GFLOP/s for float32). A shared library that is loaded with RTLD_GLOBAL
before `mlx.core` supplies `cblas_sgemm` and the other functions instead. The first of these that can be loaded is used:

1. the file named by MLX_PARALLM_BLAS (the value `none` skips all of them);
2. OpenBLAS from the `ngsolve-openblas` wheel (a dependency on Linux x86-64);
3. OpenBLAS from the system (Debian: libopenblas0-pthread);
4. MKL from the `mkl` wheel or the system.

On macOS nothing is loaded, because MLX uses Accelerate and Metal there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ENV_VAR = "MLX_PARALLM_BLAS"
INSTALL_HINT = (
    "no fast BLAS found: float32 matrix products will be 20-50x slower. Install one: "
    "`apt-get install libopenblas0-pthread`, or `pip install mkl`, "
    f"or set {ENV_VAR} to the path of a libopenblas.so"
)


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS in use: its name, whether it is fast, and the problem if it is not."""

    name: str
    fast: bool
    problem: str = ""


def preload() -> Blas:
    """Loads the first BLAS that is found. Never raises, because a slow BLAS still works."""
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
            _load(path)
        except OSError as error:
            problem = f"{INSTALL_HINT} (last tried: {error})"
        else:
            return Blas(path.name, fast=True)
    return Blas("MLX's own", fast=False, problem=problem)


def _load(path: Path) -> None:
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if "libgfortran" not in str(error):
            raise
        _load_with_mlx_gfortran(path)


def _load_with_mlx_gfortran(path: Path) -> None:
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
        ctypes.CDLL(str(Path(folder) / path.name), mode=ctypes.RTLD_GLOBAL)


def _package_files(package: str, pattern: str) -> Iterator[Path]:
    """Files of an installed package, which is not imported. `mlx_cpu.libs` is a folder, not a package."""
    spec = None if "." in package else importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else [f"{entry}/{package}" for entry in sys.path]
    for folder in folders:
        yield from sorted(Path(folder).glob(pattern))
