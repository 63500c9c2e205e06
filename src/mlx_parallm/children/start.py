"""How a child process of ours is started."""

from __future__ import annotations

import os
import sys

from mlx_parallm.blas import ENV_VAR

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """-P: the folder that the server was started in is no place to import from."""
    return (sys.executable, "-P", "-m", module, *arguments)


def environment() -> dict[str, str]:
    """Ours, with the same places to import from; no BLAS is loaded, and NumPy's has one thread."""
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), ENV_VAR: "none", "PYTHONPATH": places}
