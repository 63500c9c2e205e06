"""MLX ParaLLM: one base model, many adapters, served and trained in one process."""

from mlx_parallm import blas

__version__ = "0.1.0"

# Must happen before anything imports mlx.core: MLX's Linux CPU build binds its BLAS symbols on load.
BLAS = blas.preload()
