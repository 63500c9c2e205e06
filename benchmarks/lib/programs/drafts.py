"""Writes what drafts of the bundled model are measured with: a draft model of its own first layers.

    python benchmarks/lib/programs/drafts.py DIR

DIR/first_layers      a model directory with the first layers, the final norm and the embedding, which is the head too
"""

import sys
from pathlib import Path

import mlx_parallm  # noqa: F401  # isort: skip  before mlx.core: it chooses the BLAS

from mlx_lm.utils import save_config, save_model

from mlx_parallm.model.bundled import load_bundled

LAYERS = 6


def write_first_layers(folder: Path, layers: int = LAYERS) -> None:
    """Writes the bundled model without its later layers, in its own quantization. It was not trained to end so early,
    so it drafts badly."""
    model, tokenizer, config = load_bundled(dequantize=False)
    model.model.layers = model.model.layers[:layers]
    save_model(folder, model)
    save_config(config | {"num_hidden_layers": layers}, folder / "config.json")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_first_layers(Path(sys.argv[1]) / "first_layers")
