"""Writes random LoRA adapters for the bundled model, in mlx-lm's format, to try things with.

python examples/random_adapter.py DIR [DIR ...] [--rank 8] [--seed 0] [--size 0.5]
"""

import argparse
from pathlib import Path

import numpy as np

from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.weights import AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.layout import adapter_layout

SCALE = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the first adapter; the next ones have the next seeds")
    parser.add_argument("--size", type=float, default=0.5, help="of the change, next to what the linears give")
    options = parser.parse_args()
    model, _, _ = load_bundled(dequantize=False)
    layout = adapter_layout(model)
    for seed, folder in enumerate(options.folders, options.seed):
        random = np.random.default_rng(seed)
        pairs = {path: random_pair(random, spec, options.rank, options.size) for path, spec in layout.linears.items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_mlx_lm(folder, AdapterWeights(pairs), layout)


def random_pair(random: np.random.Generator, spec: LinearSpec, rank: int, size: float) -> LoRAPair:
    """Factors whose product changes what the linear gives by about `size`."""
    a = random.normal(size=spec.a_shape(rank)) / np.sqrt(spec.in_features)
    b = random.normal(size=spec.b_shape(rank)) * size / np.sqrt(rank) / SCALE
    return LoRAPair(a.astype(np.float32), b.astype(np.float32), SCALE)


if __name__ == "__main__":
    main()
