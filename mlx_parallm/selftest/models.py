"""The models that are tested: tiny random ones, which need no network, and the bundled one or the user's own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.model.bundled import BUNDLED_NAME, bundled_path
from mlx_parallm.model.loading import find_model

_VOCAB_SIZE = 320
"""256 bytes, the special tokens, and ids without a token, as padded vocabularies have."""
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": _VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 257,
}
_QUANTIZATION = {"group_size": 32, "bits": 4}
_LARGE_POOL = {**_CONFIG, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256}
KEY_BYTES = 8 * 256 * 4
"""Bytes of one token's keys, and of its values, in `large_pool_model`."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model to test. `name`: in the report, without a path of this machine. `path`: None is the bundled model.
    `timed`: whether the times of its parts say something about the machine."""

    name: str
    path: str | None
    timed: bool = False


def tiny_models(folder: Path) -> Iterator[ModelChoice]:
    """Two tiny random models, which are written into `folder`: in float32, whose limits are the tightest, and in 4 bits
    with bfloat16 activations, as most models on a Mac are. A CPU serves the second one in float32 too."""
    for name, quantized in (("tiny, float32", False), ("tiny, 4-bit", True)):
        path = folder / name.partition(", ")[2]
        _write(path, _CONFIG, quantized)
        yield ModelChoice(name, str(path))


def large_pool_model(folder: Path) -> Path:
    """Writes a tiny model into `folder`, with few operations in a step, and much memory for keys and values."""
    path = folder / "large-pool"
    _write(path, _LARGE_POOL, quantized=False)
    return path


def real_model(path: str | None) -> ModelChoice | None:
    """The model that the user names, which may be downloaded; without a name the bundled one. None: that is not
    installed. Raises ModelNotFoundError: there is no model of that name."""
    if path is None:
        try:
            bundled_path()
        except ModelNotFoundError:
            return None
        return ModelChoice(BUNDLED_NAME, None, timed=True)
    find_model(path)
    return ModelChoice("a local folder" if Path(path).expanduser().exists() else path, path, timed=True)


def _write(folder: Path, config: dict[str, Any], quantized: bool) -> None:
    """Writes a model as mlx-lm lays it out."""
    model, config = llama.Model(llama.ModelArgs.from_dict(config)), dict(config)
    shapes = [(name, array.shape) for name, array in tree_flatten(model.parameters())]
    keys = mx.random.split(mx.random.key(0), len(shapes))
    weights = [(name, _random(name, shape, key)) for (name, shape), key in zip(shapes, keys, strict=True)]
    model.update(tree_unflatten(weights))
    if quantized:
        nn.quantize(model, **_QUANTIZATION)
        model.update(tree_map(_halved, model.parameters()))
        config["quantization"] = _QUANTIZATION
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer().save_pretrained(folder)


def _random(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Matrices keep the size of what passes through them; the weights of norms are about one."""
    noise = mx.random.normal(shape, key=key)
    return 1 + 0.1 * noise if len(shape) == 1 else noise * (0.5 if "embed" in name else 1 / math.sqrt(shape[-1]))


def _halved(array: mx.array) -> mx.array:
    return array.astype(mx.bfloat16) if mx.issubdtype(array.dtype, mx.floating) else array


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        pad_token=_SPECIAL[2],
        chat_template=_TEMPLATE,
    )
