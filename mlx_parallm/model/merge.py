"""`mlx_parallm adapters export` and `average`: write an adapter for another program, a model with an adapter in its
weights, or the weighted mean of several adapters."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import save_config, save_model

from mlx_parallm.adapters.average import Average, average
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import FormatName, write_adapter
from mlx_parallm.adapters.runs import adapter_in
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.atomic import new_folder
from mlx_parallm.errors import AdapterFileError, ConfigError, UnsupportedModelError
from mlx_parallm.extras_table import needed
from mlx_parallm.model.bundled import BUNDLED_HUB_ID
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.loading import GENERATION_CONFIG, LoadedModel, load
from mlx_parallm.model.packing import dequantize as dequantize_layers
from mlx_parallm.model.packing import packed_like
from mlx_parallm.model.split import owner_of

ExportFormat = Literal[FormatName, "gguf"]

_TIED = "tie_word_embeddings"
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
        OSError: it cannot be written.
    """
    base, layout = _base_for(output, model_path)
    weights = _read(adapter, layout)
    model, config, head = base.model, base.config, layout.head
    if head is not None and head.embedding and head.path in weights.pairs:
        config = untie(model, head, config)
    fuse(model, weights, layout, dequantize)
    if dequantize:
        dequantize_layers(model)
        config = {key: value for key, value in config.items() if key not in _PACKINGS}
    with new_folder(output) as folder:
        try:
            save_model(folder, model)
        except RuntimeError as error:  # of MLX's writer, which does not say why the disk refused
            raise OSError(str(error)) from error
        save_config(config, folder / "config.json")
        base.tokenizer.save_pretrained(folder)
        if (base.source / GENERATION_CONFIG).is_file():
            shutil.copy(base.source / GENERATION_CONFIG, folder)


def export_adapter(
    model_path: str | None, adapter: Path, output: Path, form: ExportFormat, base_name: str | None = None
) -> None:
    """Writes a new directory with the adapter for another program. The write is atomic.

    Args:
        model_path: the adapter's base model; None means the bundled one.
        base_name: what PEFT's config calls the base model.

    Raises:
        ConfigError: `output` exists, or a package is missing.
        ModelNotFoundError: the base cannot be loaded.
        UnsupportedModelError: neither can it, or the format has no place for the adapter.
        AdapterFileError: the adapter cannot be read, is not for this model, or the format has no place for it.
    """
    base, layout = _base_for(output, model_path)
    weights = _read(adapter, layout)
    with new_folder(output) as folder:
        if form == "gguf":
            needed("gguf", "--to gguf").write_gguf(folder, weights, layout, base.config)
        else:
            write_adapter(folder, form, weights, layout, base_name)


def write_average(
    model_path: str | None,
    folders: Sequence[Path],
    output: Path,
    form: FormatName,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    check: Callable[[Path, int], None] | None = None,
) -> Average:
    """Writes a new directory with the mean of the adapters in `folders`. The write is atomic.

    Args:
        model_path: the adapters' base model; None means the bundled one.
        form: of the files.
        weights, rank: see `adapters.average.average`.
        check: called with the average's files and the largest rank of all adapters, before `output` is there. If it
            raises, nothing is written.

    Raises:
        ConfigError: `output` exists, or weights or rank do not fit the adapters.
        ModelNotFoundError, UnsupportedModelError: the base cannot be loaded.
        AdapterFileError: an adapter cannot be read, or is not for this model. The message names its folder.
        Exception: what `check` raises.
    """
    _, layout = _base_for(output, model_path)
    members = [_read(folder, layout) for folder in folders]
    mean = average(members, weights, rank)
    with new_folder(output) as folder:
        write_adapter(folder, form, mean.weights, layout, model_path or BUNDLED_HUB_ID)
        if check is not None:
            check(folder, max(adapter.rank for adapter in (*members, mean.weights)))
    return mean


def _base_for(output: Path, model_path: str | None) -> tuple[LoadedModel, AdapterLayout]:
    """The base model as it is stored, and its linears. Raises ConfigError: `output` exists."""
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: name a directory that does not")
    prepare_device()
    base = load(model_path, dequantize=False)
    return base, adapter_layout(base.model, base.source)


def _read(folder: Path, layout: AdapterLayout) -> AdapterWeights:
    try:
        return read_adapter(adapter_in(folder), layout, max_rank=sys.maxsize).weights
    except AdapterFileError as error:
        raise AdapterFileError(f"{folder}: {error}", "lora_path") from error


def untie(model: nn.Module, head: LinearSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a tied model a linear lm_head with the weight of its embedding, and returns the config of such a model.

    Raises:
        UnsupportedModelError: mlx-lm's file of this model has no lm_head.
    """
    owner, embedding = owner_of(model), dict(model.named_modules())[head.embedding]
    tied = [each for each in (owner, owner.args) if getattr(each, _TIED, False)]
    for each in tied:
        setattr(each, _TIED, False)
    if not tied or "lm_head" not in type(owner)(owner.args):
        raise UnsupportedModelError(
            f"{config.get('model_type')} has no head apart from its embedding, so that an adapter of lm_head cannot be "
            "merged: serve the adapter, or train it without lm_head"
        )
    is_quantized = isinstance(embedding, nn.QuantizedEmbedding)
    owner.lm_head = copy.copy(embedding)
    owner.lm_head.__class__ = nn.QuantizedLinear if is_quantized else nn.Linear
    untied = {**config, _TIED: False}
    if is_quantized:
        packing = {"group_size": embedding.group_size, "bits": embedding.bits, "mode": embedding.mode}
        untied |= {key: {**config[key], head.path: packing} for key in _PACKINGS if key in config}
    return untied


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
    fused = copy.copy(linear)
    dequantize_layers(fused)
    fused.weight = (fused.weight.astype(mx.float32) + change).astype(fused.weight.dtype)
    return fused if dequantize else packed_like(linear, fused)
