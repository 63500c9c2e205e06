"""MLX ParaLLM: one resident model, served to many clients in one continuous batch."""

from mlx_parallm import blas

__version__ = "0.1.0"

# Must happen before anything imports mlx.core: MLX's Linux CPU build binds its BLAS symbols on load.
BLAS = blas.preload()
