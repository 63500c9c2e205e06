"""Adapter directories made by hand, for tests: `from adapter_folders import LAYOUT, random_weights, mlx_lm_folder`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_parallm.adapters.files import AdapterFile, AdapterRoots, read_adapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.errors import AdapterFileError

HIDDEN, KV, MLP, LAYERS, VOCABULARY = 16, 8, 24, 2, 40
HEADS = {"model.": "lm_head", "language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head"}
"""The path of the head, by that of the layers."""
_SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, KV),
    "mlp.down_proj": (MLP, HIDDEN),
}


def make_layout(prefix: str = "model.") -> AdapterLayout:
    """Two layers of three linears, and a head; one layer has experts beside them."""
    paths = {f"{prefix}layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in _SHAPES.items()}
    linears = {path: LinearSpec(path, *shape, group=path) for path, shape in paths.items()}
    refused = {
        f"{prefix}layers.0.mlp.switch_mlp.gate_proj": "expert LoRA",
        f"{prefix}embed_tokens": "embedding LoRA",
    }
    head = HEADS[prefix]
    return AdapterLayout(linears, refused, LAYERS, LinearSpec(head, HIDDEN, VOCABULARY, group=head))


LAYOUT = make_layout()
Q0, V0, DOWN0, Q1, V1, DOWN1 = LAYOUT.linears


def random_weights(
    ranks: dict[str, int], scales: dict[str, float] | float = 2.0, seed: int = 0, layout: AdapterLayout = LAYOUT
) -> AdapterWeights:
    """float32 pairs of these ranks by path."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for path, rank in ranks.items():
        spec = layout.find(path)
        a = rng.normal(size=(spec.in_features, rank)).astype(np.float32)
        b = rng.normal(size=(rank, spec.out_features)).astype(np.float32)
        pairs[path] = LoRAPair(a, b, scales if isinstance(scales, float) else scales[path])
    return AdapterWeights(pairs)


def mlx_lm_config(**changes: Any) -> dict[str, Any]:
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0} | changes.pop("lora_parameters", {})
    return {"fine_tune_type": "lora", "num_layers": LAYERS, "lora_parameters": parameters} | changes


def mlx_lm_tensors(rank: int = 4, path: str = Q0, shape: tuple[int, int] = (HIDDEN, HIDDEN)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        f"{path}.lora_a": rng.normal(size=(shape[0], rank)).astype(np.float32),
        f"{path}.lora_b": rng.normal(size=(rank, shape[1])).astype(np.float32),
    }


def peft_config(**changes: Any) -> dict[str, Any]:
    """What PEFT 0.18 writes for a LoRA on q_proj."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "org/model",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.18.0",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    } | changes


def peft_tensors(
    rank: int = 4, path: str = Q0, shape: tuple[int, int] = (HIDDEN, HIDDEN), name: str = ""
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {
        f"base_model.model.{path}.lora_A{name}.weight": rng.normal(size=(rank, shape[0])).astype(np.float32),
        f"base_model.model.{path}.lora_B{name}.weight": rng.normal(size=(shape[1], rank)).astype(np.float32),
    }


def mlx_lm_folder(folder: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    return write_folder(folder, "adapters.safetensors", tensors, mlx_lm_config(**changes))


def peft_folder(folder: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    return write_folder(folder, "adapter_model.safetensors", tensors, peft_config(**changes))


def write_folder(folder: Path, name: str, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def safetensors(header: Any, data: bytes = b"") -> bytes:
    """A weights file of any header, well-formed or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read(
    folder: Path, layout: AdapterLayout = LAYOUT, max_rank: int = 16, roots: AdapterRoots | None = None
) -> AdapterFile:
    return read_adapter(folder, layout, max_rank, roots)


def refusal(folder: Path, **options: Any) -> str:
    """The message of the one error that content may cause."""
    with pytest.raises(AdapterFileError) as caught:
        read(folder, **options)
    message = str(caught.value)
    assert caught.value.param == "lora_path"
    assert message.isascii()
    assert len(message) < 800
    return message
