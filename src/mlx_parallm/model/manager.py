"""`SharedModelManager`: the one base model that serving, training and the KL reference share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters

from mlx_parallm.core import ModelCard
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.bundled import BUNDLED_NAME, bundled_path, load_bundled
from mlx_parallm.model.cpu import adapt_to_cpu
from mlx_parallm.model.device import on_cpu, prepare_device
from mlx_parallm.model.families import Family, Standing, classify
from mlx_parallm.model.layers import LayerSpec, ModelShape, probe
from mlx_parallm.model.loading import find_model, load_directory
from mlx_parallm.model.progress import materialize
from mlx_parallm.model.tokenizer import Tokenizer

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_NO_LIMIT = 10**9  # Transformers writes a huge model_max_length where a tokenizer has none


@dataclass(frozen=True, slots=True)
class SharedModelManager:
    """A loaded model and what is known of it. Its arrays belong to the thread that loaded it.

    `source`: the model's directory, or the one file that holds it all.
    `layers`: one spec for each cache the model expects, in order. `kv_dtype`: of keys and values.
    An UNPROVED `family` must pass `families.check_offsets` before it serves.
    """

    model: nn.Module
    tokenizer: Tokenizer
    config: dict[str, Any]
    card: ModelCard
    family: Family
    layers: tuple[LayerSpec, ...]
    kv_dtype: mx.Dtype
    source: Path

    @classmethod
    def load(
        cls,
        path_or_id: str | None,
        *,
        trust_remote_code: bool = False,
        allow_special_tokens: bool = False,
        progress: bool = True,
    ) -> SharedModelManager:
        """Loads a directory or hub id that mlx-lm loads, or the bundled model (None). On the device thread.

        On a CPU weights become float32; on Metal and CUDA they stay as they are stored. `allow_special_tokens`: see
        `Tokenizer`.

        Raises:
            ModelNotFoundError: no such directory or hub model.
            UnsupportedModelError: the architecture cannot be loaded, or cannot be batched.
        """
        prepare_device()
        source = bundled_path() if path_or_id is None else find_model(path_or_id, progress)
        name, model, wrapped, config = _load(source, path_or_id, trust_remote_code)
        family = classify(model)
        if family.standing is Standing.REFUSED:
            raise UnsupportedModelError(f"{name} ({family.name}) is not supported: {family.reason}")
        materialize(model, name, progress)
        if on_cpu():
            adapt_to_cpu(model)
        shape = probe(model)
        card = _card(name, model, config, wrapped, shape)
        tokenizer = Tokenizer(wrapped, allow_special_tokens)
        return cls(model, tokenizer, config, card, family, shape.layers, shape.kv_dtype, source)


def _load(
    source: Path, path_or_id: str | None, trust_remote_code: bool
) -> tuple[str, nn.Module, TokenizerWrapper, dict[str, Any]]:
    if path_or_id is None:
        model, hf, config = load_bundled(dequantize=on_cpu())
        return BUNDLED_NAME, model, TokenizerWrapper(hf, eos_token_ids=[config["eos_token_id"]]), config
    name = source.resolve().name if Path(path_or_id).expanduser().exists() else path_or_id
    return name, *load_directory(source, dequantize=on_cpu(), trust_remote_code=trust_remote_code)


def _card(
    name: str, model: nn.Module, config: dict[str, Any], tokenizer: TokenizerWrapper, shape: ModelShape
) -> ModelCard:
    return ModelCard(
        name=name,
        context_length=_context_length(model, config, tokenizer),
        vocab_size=shape.vocab_size,
        quantization=_quantization(config),
        dtype=str(shape.kv_dtype).removeprefix("mlx.core."),
        parameters=get_total_parameters(model),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
    )


def _quantization(config: dict[str, Any]) -> str:
    """How the weights were stored, and what became of it."""
    quantization = config.get("quantization") or config.get("quantization_config")
    if not quantization:
        return "none"
    stored = f"{quantization['bits']}-bit" if "bits" in quantization else str(quantization.get("quant_method"))
    return f"{stored}, dequantized" if on_cpu() else stored


def _context_length(model: nn.Module, config: dict[str, Any], tokenizer: TokenizerWrapper) -> int:
    for length in _declared_lengths(model, config, tokenizer):
        if isinstance(length, int) and 0 < length < _NO_LIMIT:
            return length
    raise UnsupportedModelError(f"no context length in the config: add {_CONTEXT_KEYS[0]} to config.json")


def _declared_lengths(model: nn.Module, config: dict[str, Any], tokenizer: TokenizerWrapper) -> Iterator[Any]:
    """Where a context length may stand, best first; a text model may be nested in one of more media."""
    for section in (config, config.get("text_config") or {}):
        yield from (section.get(key) for key in _CONTEXT_KEYS)
    for module in (model, getattr(model, "language_model", None)):
        yield from (getattr(getattr(module, "args", None), key, None) for key in _CONTEXT_KEYS)
    yield tokenizer.model_max_length
