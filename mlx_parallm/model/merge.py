"""`mlx_parallm adapters merge` and `convert`: add an adapter to a model's weights, or write it in another format."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import save_config, save_model

from mlx_parallm.adapters.checkpoints import adapter_in
from mlx_parallm.adapters.files.formats import FormatName
from mlx_parallm.adapters.files.read import read_adapter
from mlx_parallm.adapters.files.write import write_adapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.atomic import new_folder
from mlx_parallm.errors import ConfigError, UnsupportedModelError
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.linears import adapter_layout
from mlx_parallm.model.loading import LoadedModel, load
from mlx_parallm.model.packing import dense_weight, packed_like
from mlx_parallm.model.packing import dequantize as dequantize_layers
from mlx_parallm.model.split import owner_of

_GENERATION_CONFIG = "generation_config.json"
_TIED = "tie_word_embeddings"
_PER_HEAD = (MultiLinear, QuantizedMultiLinear)
_PACKINGS = ("quantization", "quantization_config")
"""Keys of a config that say how weights are packed, by path if they differ."""


def merge(model_path: str | None, adapter: Path, output: Path, *, dequantize: bool = False) -> None:
    """Writes a new model directory: the base model with the adapter added to its weights. The write is atomic.

    Sums are computed in float32 and stored in the base's type. A quantized linear that the adapter changes is quantized
    again in the same way, which rounds the adapter's change too. If the adapter changes the head of a tied model, that
    gets a head of its own, so that its embedding stays as it is.

    Args:
        model_path: None means the bundled model.
        dequantize: store a dense model instead of a quantized one.

    Raises:
        ConfigError: `output` exists.
        ModelNotFoundError, UnsupportedModelError: the base cannot be loaded, or cannot have a head of its own.
        AdapterFileError: the adapter cannot be read, or is not for this model.
    """
    base = _load_for(output, model_path)
    layout = adapter_layout(base.model, base.source)
    weights = read_adapter(adapter_in(adapter), layout, max_rank=sys.maxsize).weights
    model, config, head = base.model, base.config, layout.head
    if head is not None and head.embedding and head.path in weights.pairs:
        config = untie(model, head, config)
    fuse(model, weights, layout, dequantize)
    if dequantize:
        dequantize_layers(model)
        config = {key: value for key, value in config.items() if key not in _PACKINGS}
    with new_folder(output) as folder:
        save_model(folder, model)
        save_config(config, folder / "config.json")
        base.tokenizer.save_pretrained(folder)
        if (base.source / _GENERATION_CONFIG).is_file():
            shutil.copy(base.source / _GENERATION_CONFIG, folder)


def convert(model_path: str | None, adapter: Path, output: Path, form: FormatName) -> None:
    """Writes a new directory with the adapter in another format. The write is atomic.

    Args:
        model_path: the adapter's base model; None means the bundled one. PEFT's format names it.
        form: `peft` or `mlx-lm`.

    Raises:
        ConfigError: `output` exists.
        ModelNotFoundError, UnsupportedModelError: the base cannot be loaded.
        AdapterFileError: the adapter cannot be read, or is not for this model.
    """
    base = _load_for(output, model_path)
    layout = adapter_layout(base.model, base.source)
    weights = read_adapter(adapter_in(adapter), layout, max_rank=sys.maxsize).weights
    with new_folder(output) as folder:
        write_adapter(folder, form, weights, layout, model_path)


def _load_for(output: Path, model_path: str | None) -> LoadedModel:
    """The base model as it is stored. Raises ConfigError: `output` exists."""
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: name a directory that does not")
    prepare_device()
    return load(model_path, dequantize=False)


def untie(model: nn.Module, head: LinearSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a tied model a linear lm_head with the weight of its embedding, and returns the config of such a model.

    Raises:
        UnsupportedModelError: mlx-lm's file of this model has no lm_head.
    """
    owner, embedding = owner_of(model), dict(model.named_modules())[head.embedding]
    places = [place for place in (owner, owner.args) if getattr(place, _TIED, False)]
    for place in places:
        setattr(place, _TIED, False)
    if not places or "lm_head" not in type(owner)(owner.args):
        raise UnsupportedModelError(
            f"{config.get('model_type')} has no head apart from its embedding, so that an adapter of lm_head cannot be "
            "merged: serve the adapter, or train it without lm_head"
        )
    untied = {**config, _TIED: False}
    if not isinstance(embedding, nn.QuantizedEmbedding):
        owner.lm_head = nn.Linear(1, 1, bias=False)
        owner.lm_head.weight = embedding.weight
        return untied
    packing = {"group_size": embedding.group_size, "bits": embedding.bits, "mode": embedding.mode}
    owner.lm_head = nn.QuantizedLinear(embedding.dims, embedding.num_embeddings, bias=False, **packing)
    owner.lm_head.update(embedding.parameters())
    return {**untied, **{key: {**untied[key], head.path: packing} for key in _PACKINGS if key in untied}}


def fuse(model: nn.Module, weights: AdapterWeights, layout: AdapterLayout, dequantize: bool) -> None:
    """Replaces every W that the adapter changes by W + scale · (a b)ᵀ, lazily."""
    modules = dict(model.named_modules())
    fused = [
        (at, _fused(modules[at], change, dequantize))
        for path, pair in weights.pairs.items()
        for at, change in _changes(layout.find(path), path, pair)
    ]
    model.update_modules(tree_unflatten(fused))


def _changes(spec: LinearSpec | None, path: str, pair: LoRAPair) -> Iterator[tuple[str, mx.array]]:
    """What an adapter adds to the weight of each module that does the work of a linear, by path: scale · (a b)ᵀ."""
    product = pair.scale * (mx.array(pair.a) @ mx.array(pair.b))
    if spec is None or spec.parts is None:
        yield path, product.swapaxes(-1, -2)
    else:
        for at in (spec.parts.keys, spec.parts.values):
            yield at, spec.parts.weight(at, product)


def _fused(linear: nn.Module, change: mx.array, dequantize: bool) -> nn.Module:
    dense = dense_weight(linear)
    if isinstance(linear, _PER_HEAD):
        fused = MultiLinear(1, 1, 1)
    else:
        fused = SwitchLinear(1, 1, 1, bias=False) if dense.ndim == 3 else nn.Linear(1, 1, bias=False)
    fused.weight = (dense.astype(mx.float32) + change).astype(dense.dtype)
    if "bias" in linear:
        fused.bias = linear.bias
    return fused if dequantize else packed_like(linear, fused)
