"""`mlx_parallm merge`: a base model and an adapter become one model directory that mlx-lm loads."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model, save_config, save_model

from mlx_parallm.adapters.atomic import new_folder
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.errors import ConfigError, UnsupportedModelError
from mlx_parallm.model.adapted import adapter_layout
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.families import classify
from mlx_parallm.model.loading import find_model, load_directory

_GENERATION_CONFIG = "generation_config.json"


def merge(model_path: str | None, adapter: Path, output: Path, *, dequantize: bool = False) -> None:
    """Writes the model (None: the bundled one) with the adapter in its weights as a new directory, whole or not at all.

    Sums are float32, stored in the base's type. A quantized linear that the adapter changes is quantized again as it
    was, which rounds the change too; `dequantize` stores a dense model instead.

    Raises:
        ConfigError: `output` exists.
        ModelNotFoundError, UnsupportedModelError: the base cannot be loaded.
        AdapterFileError: the adapter cannot be read, or is of another model.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: name a directory that does not")
    prepare_device()
    source = None if model_path is None else find_model(model_path, progress=True)
    model, tokenizer, config = _bundled() if source is None else load_directory(source, False, False)
    weights = read_adapter(adapter, adapter_layout(model, classify(model)), max_rank=sys.maxsize).weights
    fuse(model, weights, dequantize)
    if dequantize:
        model = dequantize_model(model)
        config = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    with new_folder(output) as folder:
        save_model(folder, model)
        save_config(config, folder / "config.json")
        tokenizer.save_pretrained(folder)
        if source is not None and (source / _GENERATION_CONFIG).is_file():
            shutil.copy(source / _GENERATION_CONFIG, folder)


def fuse(model: nn.Module, weights: AdapterWeights, dequantize: bool) -> None:
    """Puts W + scale · (a b)ᵀ in the place of every W that the adapter changes, lazily.

    Raises:
        UnsupportedModelError: a layer's packing is one that mlx-lm does not dequantize.
    """
    packed = next((name for name, _ in tree_flatten(model.parameters()) if name.endswith(".global_scale")), None)
    if packed:
        raise UnsupportedModelError(f"cannot dequantize {packed}: merge into an unquantized or affine-quantized copy")
    modules = dict(model.named_modules())
    fused = [(path, _fused(modules[path], pair, dequantize)) for path, pair in weights.pairs.items()]
    model.update_modules(tree_unflatten(fused))


def _fused(linear: nn.Module, pair: LoRAPair, dequantize: bool) -> nn.Module:
    dense = _dense(linear)
    delta = pair.scale * (mx.array(pair.a) @ mx.array(pair.b)).T
    outputs, inputs = dense.shape
    fused = nn.Linear(inputs, outputs, bias=False)
    fused.weight = (dense.astype(mx.float32) + delta).astype(dense.dtype)
    if "bias" in linear:
        fused.bias = linear.bias
    if dequantize or not isinstance(linear, nn.QuantizedLinear):
        return fused
    return nn.QuantizedLinear.from_linear(fused, linear.group_size, linear.bits, mode=linear.mode)


def _dense(linear: nn.Module) -> mx.array:
    """The weight [out, in]."""
    weight: mx.array = linear.weight
    if isinstance(linear, nn.QuantizedLinear):
        packing = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
        weight = mx.dequantize(weight, linear.scales, linear.biases, **packing)
    return weight


def _bundled() -> tuple[nn.Module, Any, dict[str, Any]]:
    """As stored, its config completed with the packing of the modules that differ from the rest."""
    model, tokenizer, config = load_bundled(dequantize=False)
    packing = config["quantization"]
    for path, module in model.named_modules():
        if "scales" in module and module.bits != packing["bits"]:
            packing[path] = {"group_size": module.group_size, "bits": module.bits}
    return model, tokenizer, config
