"""Writes a random model of 2.16 GB with few, wide layers, and the bundled tokenizer, as a directory for mlx-lm.

python benchmarks/lib/programs/wide_model.py DIR
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_parallm.model.bundled import load_bundled

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
"""541 million float32 weights, 101 million of them in the embedding, which is also the output head."""


def write_random_model(folder: Path, shape: Mapping[str, int] = SHAPE) -> None:
    """Writes a model of this shape: 2.16 GB by default. The weights have the initial values of MLX's modules."""
    folder.mkdir(parents=True)
    _, tokenizer, config = load_bundled(dequantize=False)
    config = {name: value for name, value in config.items() if name != "quantization"} | shape
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_random_model(Path(sys.argv[1]))
