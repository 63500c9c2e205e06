"""Tiny checkpoints with a prediction head, as they are published, and what that head gives by the published formula."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from family_checks import CONFIGURATIONS
from mlx.utils import tree_flatten, tree_unflatten
from tiny import VOCAB_SIZE, build_model, tiny_tokenizer

from mlx_parallm.model.split import owner_of, trunk_of

Weights = dict[str, mx.array]

_LAYERS = 3
"""Of the base model. The head is what would be the fourth one."""
_ZERO_CENTERED = ("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm", "enorm", "hnorm")
"""Norms of Qwen's models, whose published weights are too small by 1."""
_ADDS = re.compile(r"layers\..*\.(o_proj|out_proj|down_proj)\.")
"""What a layer adds to its input comes from these."""
_QWEN_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}


def head_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny checkpoint with a head."""
    config = {**CONFIGURATIONS[family], "num_hidden_layers": _LAYERS, "vocab_size": VOCAB_SIZE, "hidden_size": 64}
    config |= {"max_position_embeddings": 4096, "first_k_dense_replace": 1}
    if family.startswith("qwen"):
        declared = {"full_attention_interval": 2, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1}
    else:
        declared = {"num_nextn_predict_layers": 1, "rope_scaling": None}
    return {**config, **declared, **overrides}


@dataclass
class Reference:
    """The base model and the parts of the head, in plain arrays but for the decoder layer, which is mlx-lm's."""

    model: nn.Module
    layer: nn.Module
    own: Weights
    embedding: mx.array
    head: mx.array

    def logits(self, tokens: list[int]) -> mx.array:
        """[T - 1, vocab]: after each token but the first one, from it and the hidden state before it."""
        trunk = trunk_of(self.model)
        hidden = trunk(mx.array([tokens]))[0]
        return self.step(tokens[1:], hidden[:-1])[1]

    def step(self, tokens: list[int], hidden: mx.array) -> tuple[mx.array, mx.array]:
        """The head's own hidden states and logits after each of these tokens, from the hidden states before them."""
        embedded = self.embedding[mx.array(tokens)]
        joined = mx.concatenate([self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")], axis=-1)
        count = len(tokens)
        mask = mx.array(np.tril(np.ones((count, count), bool)))
        outputs = self.layer((joined @ self.own["eh_proj"].T)[None], mask)[0]
        outputs = self.norm(outputs, "norm")
        return outputs, outputs @ self.head.T

    def norm(self, x: mx.array, name: str) -> mx.array:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x * mx.rsqrt(mean + trunk_of(self.model).norm.eps) * self.own[name]


def save_with_head(
    config: dict[str, Any], folder: Path, *, published: bool = True, right: bool = False, seed: int = 0
) -> Reference:
    """Writes a model directory: with the names and layouts of the published files, or with mlx-lm's.

    `right`: no layer adds anything, so that the next token depends on the last one alone, and the head predicts it.
    Else all weights are random.
    """
    whole = build_model({**config, "num_hidden_layers": _LAYERS + 1}, seed)
    if right:
        parts = [(name, array) for name, array in tree_flatten(whole.parameters()) if _ADDS.search(name)]
        whole.update(tree_unflatten([(name, mx.zeros_like(array)) for name, array in parts]))
    base = build_model(config, seed)
    weights = dict(tree_flatten(whole.parameters()))
    names = [name for name, _ in tree_flatten(base.parameters())]
    base.update(tree_unflatten([(name, weights[name]) for name in names]))
    own = _of_head(config["hidden_size"], seed + 1)
    if right:
        ones = mx.ones_like(own["norm"])
        own = {
            "enorm": ones,
            "hnorm": ones,
            "norm": trunk_of(base).norm.weight,
            "eh_proj": mx.eye(*own["eh_proj"].shape),
        }
    qwen = config["model_type"].startswith("qwen")
    number = (
        61 if config["model_type"].startswith("deepseek") else _LAYERS
    )  # the only one that mlx-lm's file leaves out
    layer, names = ("mtp.layers.0.", _QWEN_NAMES) if qwen else (f"model.layers.{number}.", {"norm": "shared_head.norm"})
    stored: Weights = {}
    for name, array in weights.items():
        _, of_head, rest = name.partition(f"layers.{_LAYERS}.")
        stored[layer + rest if of_head else name] = array
    for name, array in own.items():
        stored[f"{'mtp.' if qwen else layer}{names.get(name, name)}.weight"] = array
    if not qwen:
        stored[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        stored[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"]
    save_files(folder, _published(stored, qwen, config["model_type"] == "qwen3_5_moe") if published else stored, config)
    embedding = trunk_of(base).embed_tokens.weight
    return Reference(base, whole.layers[_LAYERS], own, embedding, owner_of(base).lm_head.weight)


def _of_head(dims: int, seed: int) -> Weights:
    keys = mx.random.split(mx.random.key(seed), 4)
    norms = {
        name: mx.random.normal((dims,), key=key) for name, key in zip(("enorm", "hnorm", "norm"), keys, strict=False)
    }
    projection = mx.random.normal((dims, 2 * dims), key=keys[3]) / dims**0.5
    return {**{name: 1 + 0.2 * noise for name, noise in norms.items()}, "eh_proj": projection}


def save_files(folder: Path, weights: Weights, config: dict[str, Any]) -> None:
    """Writes a model directory of these weights, with the tiny tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(folder)


def _published(weights: Weights, qwen: bool, fused: bool) -> Weights:
    """The weights as the published files have them: experts one by one, or two of their matrices in one; the two parts
    of latent attention in one; norms around 0, and convolutions in PyTorch's layout."""
    found: Weights = {}
    for name, array in weights.items():
        name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_", "lm_")
        kind = name.split(".")[-2]
        if "switch_mlp" in name and not (fused and "mtp." not in name):
            found |= {name.replace("switch_mlp", f"experts.{number}"): each for number, each in enumerate(array)}
        elif "switch_mlp.gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj").replace("model.language_model.", "language_model.model.")]
            found[name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = mx.concatenate([array, up], 1)
        elif "switch_mlp.down_proj" in name:
            found[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = array
        elif kind == "embed_q":
            values = weights[name.replace("embed_q", "unembed_out")]
            joined = mx.concatenate([array.swapaxes(-1, -2), values], axis=1)
            found[name.replace("embed_q", "kv_b_proj")] = joined.reshape(-1, joined.shape[-1])
        elif qwen and kind == "conv1d":
            found[name] = array.moveaxis(1, 2)
        elif kind != "unembed_out" and "switch_mlp" not in name:
            centered = kind in _ZERO_CENTERED or kind.startswith("pre_fc")
            found[name] = array - 1 if qwen and centered and "linear_attn" not in name else array
    return found
