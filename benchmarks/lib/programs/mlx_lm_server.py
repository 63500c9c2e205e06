"""Runs `mlx_lm.server` with the same BLAS as this server: python benchmarks/lib/programs/mlx_lm_server.py FLAGS."""

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

from mlx_lm.server import main  # isort: skip

if __name__ == "__main__":
    main()
