"""Writes the model directory that all sides of a benchmark serve: the bundled model in float32.

    python benchmarks/lib/programs/model_dir.py DIR

mlx_lm.server cannot ignore the end-of-sequence token, so the directory declares a token that the model never draws.
Every completion then has exactly `max_tokens` tokens, at no cost to any side.
"""

import json
import sys
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

from mlx_lm.utils import save_config, save_model  # isort: skip
from mlx_parallm.model.bundled import load_bundled

UNDRAWN_TOKEN, UNDRAWN_ID = "<empty_output>", 16


def write_model_dir(folder: Path) -> None:
    """Writes 538 MB."""
    model, tokenizer, config = load_bundled(dequantize=True)
    del config["quantization"]
    save_model(folder, model)
    save_config(config, folder / "config.json")
    tokenizer.save_pretrained(folder)
    _change(folder / "config.json", eos_token_id=UNDRAWN_ID)
    _change(folder / "tokenizer_config.json", eos_token=UNDRAWN_TOKEN)


def kv_bytes_per_token(folder: Path) -> int:
    """Bytes of one token's keys and values over all layers, in float32."""
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4)


def _change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values, indent=2) + "\n")


if __name__ == "__main__":
    write_model_dir(Path(sys.argv[1]))
