"""Writes random adapters of the small model: `python -m benchmarks.lib.soak.adapters SITE NAME …`."""

import sys
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS
from benchmarks.lib.adapters.files import random_adapter
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.model.manager import SharedModelManager

RANK = 4

if __name__ == "__main__":
    site = Path(sys.argv[1])
    layout = SharedModelManager(str(site / "model"), progress=False).adapter_layout
    for seed, name in enumerate(sys.argv[2:]):
        write_mlx_lm(site / "adapters" / name, random_adapter(layout, seed, RANK), layout)
