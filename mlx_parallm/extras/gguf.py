"""Writes an adapter as a GGUF file, which llama.cpp and the programs made of it apply to their own file of the base.

    general.type adapter · general.architecture llama · adapter.type lora · adapter.lora.alpha 32
    blk.3.attn_q.weight.lora_a [rank, in]  blk.3.attn_q.weight.lora_b [out, rank]    of experts: one more axis first

llama.cpp computes W x + (alpha / rank) · b (a x), with one alpha for the file and each pair's own rank. Names of
tensors come from the package `gguf`. For some architectures, llama.cpp's files of models have the rows of q and k in
another order, because it rotates neighbouring numbers where Transformers rotates those half a head apart; the rows of b
follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_parallm import atomic
from mlx_parallm.adapters.formats import rescaled, transformers_path
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair, lora_alpha
from mlx_parallm.errors import ConfigError, UnsupportedModelError
from mlx_parallm.optional_packages import GGUF

FILE = "adapter.gguf"
ARCHITECTURES: Mapping[str, str] = {
    **{"llama": "llama", "mistral": "llama", "mixtral": "llama", "smollm3": "smollm3", "granite": "granite"},
    **{"qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"},
    **{"gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3", "gemma3_text": "gemma3", "phi3": "phi3"},
    **{"olmo2": "olmo2", "olmoe": "olmoe", "lfm2": "lfm2"},
}
"""llama.cpp's name of an architecture, by the `model_type` of a config. benchmarks/studies/exports.py tries each."""
_PERMUTED = frozenset({"llama", "mistral", "mixtral", "smollm3", "granite"})
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_EXPERTS = re.compile(r"(.*\.layers\.\d+)\..*\bswitch_mlp\.(\w+)")

Float32 = NDArray[np.float32]


def write_gguf(folder: Path, weights: AdapterWeights, layout: AdapterLayout, config: Mapping[str, Any]) -> None:
    """Writes `adapter.gguf`, in float32. `config`: of the base model.

    Raises:
        ConfigError: the package `gguf` is not installed.
        UnsupportedModelError: llama.cpp has no place for one of the linears, or its file of the architecture differs in
            more than names and the order of rows.
    """
    if not GGUF.installed:
        raise ConfigError(f"--to gguf: {GGUF.missing}")
    import gguf

    kind = config.get("model_type", "")
    if kind not in ARCHITECTURES:
        raise _no_place(f"adapters of {kind or 'this model'}")
    alpha = max((lora_alpha(pair.scale, pair.rank) for pair in weights.pairs.values()), key=abs) or 1.0  # 0 means none
    writer = gguf.GGUFWriter(folder / FILE, ARCHITECTURES[kind])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, pair in _named(weights, layout, ARCHITECTURES[kind]):
        a, b = pair.a.swapaxes(-1, -2), rescaled(pair, alpha / pair.rank).swapaxes(-1, -2)
        if kind in _PERMUTED:
            b = _permuted(b, name, config)
        for factor, array in (("a", a), ("b", b)):
            writer.add_tensor(f"{name}.lora_{factor}", np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    atomic.sync(folder / FILE)


def _named(weights: AdapterWeights, layout: AdapterLayout, architecture: str) -> Iterator[tuple[str, LoRAPair]]:
    """The pairs by llama.cpp's names of their weights. A linear that is a part of one in Transformers has none."""
    import gguf

    (of,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(of, layout.layers)
    for path, pair in weights.pairs.items():
        there = transformers_path(path, layout).replace("model.language_model.", "model.", 1)
        there = _EXPERTS.sub(r"\1.mlp.experts.\2", there)
        name = names.get_name(f"{there}.weight", try_suffixes=(".weight",))
        tied = layout.head is not None and path == layout.head.path and layout.head.embedding
        if name is None or tied or len(layout.spelled(there)) > 1:
            raise _no_place(f"the adapter of {'a tied head' if tied else path}")
        yield name, pair


def _permuted(b: Float32, name: str, config: Mapping[str, Any]) -> Float32:
    """The rows of q or k [out, rank] in llama.cpp's order: the two halves of each head take turns."""
    part = {"attn_q": "q_proj", "attn_k": "k_proj"}.get(name.split(".")[-2])
    if part is None:
        return b
    heads = config.get(_HEADS[part]) or config[_HEADS["q_proj"]]
    return b.reshape(heads, 2, -1, b.shape[-1]).swapaxes(1, 2).reshape(b.shape)


def _no_place(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"--to gguf: {what} cannot be written as GGUF: write a model with --to fused --dequantize instead; without "
        "experts and recurrent layers, llama.cpp's convert_hf_to_gguf.py converts that"
    )
