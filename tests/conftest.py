"""Loads the BLAS before any test module can import MLX."""

import mlx_parallm  # noqa: F401
