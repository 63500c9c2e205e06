"""Runs before any test module can import MLX. Timing decides no test: hypothesis sets no deadline."""

import os

# Each of two workers has a core of its own; the servers that tests start inherit this. Read when the BLAS is loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis import settings

import mlx_parallm  # noqa: F401

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
