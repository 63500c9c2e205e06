"""MLX ParaLLM: one resident model, served to many clients in one continuous batch, and trained while it serves."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_parallm import blas

if TYPE_CHECKING:
    from mlx_parallm.app.serve import RLIntegratedServer
    from mlx_parallm.config import LoRAConfig, RLConfig
    from mlx_parallm.engine.scheduler import RLAwareScheduler
    from mlx_parallm.engine.thread import ContinuousBatchProcessor
    from mlx_parallm.extras.retrain.engine import RetrainEngine
    from mlx_parallm.kv.cache import LoRABatchedKVCache
    from mlx_parallm.model.manager import CheckpointManager, SharedModelManager
    from mlx_parallm.train.trainer import GRPOTrainer

__all__ = [
    "BLAS",
    "CheckpointManager",
    "ContinuousBatchProcessor",
    "GRPOTrainer",
    "LoRABatchedKVCache",
    "LoRAConfig",
    "RLAwareScheduler",
    "RLConfig",
    "RLIntegratedServer",
    "RetrainEngine",
    "SharedModelManager",
    "__version__",
]

__version__ = "0.1.0"

# This runs before anything imports mlx.core, because MLX's Linux CPU build binds its BLAS symbols when it is loaded.
BLAS = blas.preload()

# Set before anything imports transformers, which would warn that PyTorch is missing; only its tokenizers are used.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_LAZY = {
    "CheckpointManager": "mlx_parallm.model.manager",
    "ContinuousBatchProcessor": "mlx_parallm.engine.thread",
    "GRPOTrainer": "mlx_parallm.train.trainer",
    "LoRABatchedKVCache": "mlx_parallm.kv.cache",
    "LoRAConfig": "mlx_parallm.config",
    "RLAwareScheduler": "mlx_parallm.engine.scheduler",
    "RLConfig": "mlx_parallm.config",
    "RLIntegratedServer": "mlx_parallm.app.serve",
    "RetrainEngine": "mlx_parallm.extras.retrain.engine",
    "SharedModelManager": "mlx_parallm.model.manager",
}


def __getattr__(name: str) -> Any:
    """Imports a public class at its first use, because importing MLX and its dependencies takes a second."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
