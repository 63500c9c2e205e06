"""Adapters and reward models as PEFT and mlx-lm save them: they fit the model, or one error says why not."""

import math
import tempfile
from pathlib import Path

import numpy as np
from adapter_folders import LAYOUT, mlx_lm_tensors, peft_tensors
from fuzz.mutation import json_with, of_files, safetensors_with, unpacked

from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.errors import AdapterFileError
from mlx_parallm.extras.reward_models.folder import read_reward_model

CONFIG = "adapter_config.json"
FIELDS = [
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "bias",
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "peft_type",
    "task_type",
    "fine_tune_type",
    "num_layers",
    "lora_parameters",
    "rank",
    "scale",
    "keys",
    "layer_replication",
    "target_parameters",
    "exclude_modules",
    "trainable_token_indices",
    "lora_bias",
]
WORDS = ("LORA", "lora", "dora", "SEQ_CLS", "q_proj", "all-linear", "score", ["q_proj"], ["score"], 4, 8, 16, "(a+)+$")
TENSORS = [*peft_tensors(), *mlx_lm_tensors(), "score.weight", "base_model.model.lm_head.weight", "__metadata__"]
mutated = of_files({".json": json_with(FIELDS, WORDS), ".safetensors": safetensors_with(TENSORS)})


def refused(error):
    """An error that an answer may show."""
    assert error.param == "lora_path"
    assert str(error).isascii()
    assert len(str(error)) < 4000


def run(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in unpacked(data).items():
            if file in (CONFIG, "adapters.safetensors", "adapter_model.safetensors"):
                (folder / file).write_bytes(content)
        for read in (read_adapter, read_reward_model):
            try:
                found = read(folder, LAYOUT, 16)
            except AdapterFileError as error:
                refused(error)
                continue
            weights = found.weights if read is read_adapter else found.adapter
            for path, pair in weights.pairs.items():
                spec = LAYOUT.find(path)
                assert (pair.a.shape, pair.b.shape) == (spec.a_shape(pair.rank), spec.b_shape(pair.rank))
                assert np.isfinite(pair.a).all()
                assert np.isfinite(pair.b).all()
                assert math.isfinite(pair.scale)
