"""Writes a random model of two narrow layers, and the bundled tokenizer, as a directory for mlx-lm.

    python benchmarks/lib/programs/small_model.py DIR

For benchmarks in which no model computes.
"""

import sys
from pathlib import Path

from benchmarks.lib.programs.wide_model import write_random_model

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

if __name__ == "__main__":
    write_random_model(Path(sys.argv[1]), SHAPE)
