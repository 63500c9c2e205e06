"""MLX ParaLLM: one resident model, served to many clients in one continuous batch, and trained while it serves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_parallm import blas

if TYPE_CHECKING:
    from mlx_parallm.app import RLIntegratedServer
    from mlx_parallm.config import LoRAConfig, RLConfig

__all__ = ["BLAS", "LoRAConfig", "RLConfig", "RLIntegratedServer", "__version__"]

__version__ = "0.1.0"

# Must happen before anything imports mlx.core: MLX's Linux CPU build binds its BLAS symbols on load.
BLAS = blas.preload()

_LAZY = {"RLIntegratedServer": "mlx_parallm.app", "LoRAConfig": "mlx_parallm.config", "RLConfig": "mlx_parallm.config"}


def __getattr__(name: str) -> Any:
    """The Python face; imported when it is asked for, since it takes MLX and a second."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
