"""Loads the BLAS before any test module can import MLX. Timing decides no test: hypothesis sets no deadline."""

from hypothesis import settings

import mlx_parallm  # noqa: F401

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
