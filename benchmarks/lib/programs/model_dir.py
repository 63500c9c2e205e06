"""Writes the model directory that all sides of a benchmark serve: the bundled model in float32.

    python benchmarks/lib/programs/model_dir.py DIR [--hybrid]

With --hybrid it is a small model of random weights with recurrent layers beside attention, and the same tokenizer.

mlx_lm.server cannot ignore the end-of-sequence token, so the directory declares a token that the model never draws.
Every completion then has exactly `max_tokens` tokens, at no cost to any side.
"""

import json
import sys
from pathlib import Path

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

from mlx_lm.models import lfm2  # isort: skip
from mlx_lm.utils import save_config, save_model  # isort: skip
from mlx_parallm.model.bundled import load_bundled

UNDRAWN_TOKEN, UNDRAWN_ID = "<empty_output>", 16
HYBRID = {
    "model_type": "lfm2",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "full_attn_idxs": [2, 5],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 256,
    "block_ff_dim": 768,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}


def write_model_dir(folder: Path, hybrid: bool = False) -> None:
    """Writes 538 MB, or of a hybrid model 70."""
    model, tokenizer, config = load_bundled(dequantize=True)
    del config["quantization"]
    if hybrid:
        config = {**HYBRID, "vocab_size": config["vocab_size"]}
        model = lfm2.Model(lfm2.ModelArgs.from_dict(config))
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
    write_model_dir(Path(sys.argv[1]), "--hybrid" in sys.argv)
