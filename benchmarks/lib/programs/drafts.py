"""Writes what drafts of the bundled model are measured with: a draft model of its own first layers, and an adapter.

    python benchmarks/lib/programs/drafts.py DIR

DIR/first_layers      a model directory with the first layers, the final norm and the embedding, which is the head too
DIR/adapters/small    a random adapter that changes the output of each linear by a twentieth of its size
"""

import sys
from dataclasses import replace
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

from benchmarks.lib.adapters.files import random_adapter  # isort: skip
from mlx_lm.utils import save_config, save_model

from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.manager import SharedModelManager

LAYERS = 6
_SIZE = 0.05


def write_first_layers(folder: Path, layers: int = LAYERS) -> None:
    """Writes the bundled model without its later layers, in its own quantization. It was not trained to end so early,
    so it guesses badly."""
    model, tokenizer, config = load_bundled(dequantize=False)
    model.model.layers = model.model.layers[:layers]
    save_model(folder, model)
    save_config(config | {"num_hidden_layers": layers}, folder / "config.json")
    tokenizer.save_pretrained(folder)


def write_small_adapter(folder: Path) -> None:
    """Writes an adapter with which most texts begin as without it."""
    layout = SharedModelManager(progress=False).adapter_layout
    pairs = random_adapter(layout, seed=0).pairs
    small = {path: replace(pair, b=pair.b * _SIZE) for path, pair in pairs.items()}
    write_mlx_lm(folder, AdapterWeights(small), layout)


if __name__ == "__main__":
    write_first_layers(Path(sys.argv[1]) / "first_layers")
    write_small_adapter(Path(sys.argv[1]) / "adapters" / "small")
