"""Tiny random float32 models of every proved family, for tests: `from tiny import tiny_model`."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from _pytest.mark import ParameterSet
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.model.device import prepare_device

VOCAB_SIZE = 263
"""256 bytes, 3 special tokens, and 4 ids without a token, as padded vocabularies have."""
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|pad|>")
EOS_ID = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID + 1,
}
_GEMMA3 = {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
_OLMOE = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
_LFM2 = {
    "num_hidden_layers": 3,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
}
_MAMBA = {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4}
_MAMBA2 = {
    "num_heads": 8,
    "n_groups": 2,
    "state_size": 8,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": [0.001, 100.0],
    "time_step_rank": "auto",
}
_QWEN3_NEXT = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2_moe": {"tie_word_embeddings": False, "shared_expert_intermediate_size": 32, **_MOE},
    "qwen3_moe": {"tie_word_embeddings": False, **_MOE},
    "mixtral": {**_MIXTRAL},
    "olmoe": {"tie_word_embeddings": False, **_OLMOE},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {},
    "gemma3_text": _GEMMA3,
    "phi3": {},
    "lfm2": _LFM2,
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "qwen3_next": {**_MOE, **_QWEN3_NEXT},
}
FAMILIES = tuple(_FAMILIES)
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
}
_OTHERS = {"deepseek_v3": _LATENT}
"""Not in the package's list. Latent attention, and no experts, whose choice amplifies rounding."""
RECURRENT = ("lfm2", "mamba", "mamba2", "qwen3_next")
"""Those with layers that keep a state instead of keys and values."""

SECOND_STAGE = ("mamba2", "qwen3_next")
"""Families whose parts are those of others, so that the long tests run for them in the second stage."""


def stages(families: Sequence[str], *others: object) -> list[ParameterSet]:
    """The families as parameters of a long test, each with these other values."""
    marks = {family: [pytest.mark.slow] if family in SECOND_STAGE else [] for family in families}
    return [pytest.param(family, *others, marks=marks[family]) for family in families]


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The `config.json` of a tiny model; gemma3 nests gemma3_text's, as its multimodal checkpoints do."""
    if family == "gemma3":
        text = tiny_config("gemma3_text", **overrides)
        return {"model_type": "gemma3", "vocab_size": text["vocab_size"], "text_config": text, "eos_token_id": EOS_ID}
    return {"model_type": family, **_COMMON, **(_FAMILIES | _OTHERS)[family], **overrides}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random model whose logits are well apart; `overrides` are keys of `config.json`."""
    prepare_device()
    return build_model(tiny_config(family, **overrides), seed)


def build_model(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """Any mlx-lm model of that config with random weights."""
    file = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    module = importlib.import_module(f"mlx_lm.models.{file}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    shapes = [(name, array.shape) for name, array in tree_flatten(model.parameters())]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    random = _random_gemma if file.startswith("gemma") else _random
    weights = [(name, random(name, shape, key)) for (name, shape), key in zip(shapes, keys, strict=True)]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _random(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Matrices keep the size of what passes through; vectors (norms, biases) differ a little from one or zero."""
    noise = mx.random.normal(shape, key=key)
    if name.endswith("A_log"):  # of decays between 0.37 and 0.9 for a step of 1
        return mx.log(0.1 + 0.9 * mx.random.uniform(shape=shape, key=key))
    if len(shape) == 1:
        return 0.1 * noise + (1.0 if "norm" in name else 0.0)
    return noise * (0.5 if "embed" in name else 1.5 / math.sqrt(math.prod(shape[1:])))


def _random_gemma(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    """gemma multiplies embeddings by sqrt(hidden) and adds 1 to norm weights; a large last norm parts tied logits."""
    if "embed_tokens" in name:
        return 0.04 * mx.random.normal(shape, key=key)
    if "norm" in name:
        return 0.1 * mx.random.normal(shape, key=key) + (8.0 if name.endswith("model.norm.weight") else 0.0)
    return _random(name, shape, key)


def save_tiny(family: str, path: Path | str, seed: int = 0, **overrides: Any) -> nn.Module:
    """Writes a loadable model directory and returns the model it holds."""
    model = tiny_model(family, seed, **overrides)
    save_directory(model, tiny_config(family, **overrides), path)
    return model


def save_directory(model: nn.Module, config: dict[str, Any], path: Path | str) -> None:
    """Writes model, config and the tiny tokenizer as mlx-lm lays them out."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(folder)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte (id 0–255, in the order of GPT-2's alphabet), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        pad_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
    )
