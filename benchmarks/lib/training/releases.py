"""Released models at their full number of layers, without weights: what serving and training them takes is asked of the
server's own accounting.

A model's parameters are views of one zero each, so that a model of 35 billion takes no memory.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import MODEL_REMAPPING

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import ALL_LINEAR
from mlx_parallm.app.training import footprint_of
from mlx_parallm.kv.blocks import BLOCK_TOKENS
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.train.footprint import Footprint

sys.path.append(str(Path(__file__).parents[3] / "tests"))
from family_checks import TRUE_SIZES


def _every(count: int, layers: int, kind: str) -> list[str]:
    """The kinds of layers, of which every so many has full attention."""
    return ["full_attention" if number % count == 0 else kind for number in range(1, layers + 1)]


@dataclass(frozen=True, slots=True)
class Release:
    """A released model. `like`: its configuration in TRUE_SIZES, in which `changes` make it whole; these are the values
    of its config.json. `bits` of a weight, with the scales of its group."""

    name: str
    like: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    bits: float = 4.5

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float32 if self.bits == 32 else mx.bfloat16

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(json.dumps(TRUE_SIZES[self.like]["config"]))
        config.get("text_config", config).update(self.changes)
        return config


RELEASES = (
    Release("Llama 3.2 3B", "Llama-3.2-3B", {"num_hidden_layers": 28}),
    Release("Qwen3 8B", "Qwen3-8B", {"num_hidden_layers": 36}),
    Release("Ministral 3 8B", "Ministral 3 8B", {"num_hidden_layers": 34}),
    Release("Qwen3.5 4B", "Qwen3.5-4B", {"num_hidden_layers": 32, "full_attention_interval": 4}),
    Release(
        "Qwen3.5 35B-A3B",
        "Qwen3.5-35B-A3B",
        {"num_hidden_layers": 40, "full_attention_interval": 4, "num_experts": 256},
    ),
    Release(
        "Gemma 4 E2B",
        "Gemma 4 E4B",
        {
            "num_hidden_layers": 35,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": _every(5, 35, "sliding_attention"),
        },
    ),
    Release(
        "Gemma 4 26B-A4B",
        "Gemma 4 26B-A4B",
        {"num_hidden_layers": 30, "num_experts": 128, "layer_types": _every(6, 30, "sliding_attention")},
    ),
    Release(
        "gpt-oss-20b",
        "gpt-oss-20b",
        {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": _every(2, 24, "sliding_attention")},
    ),
    Release(
        "GLM-4.7-Flash",
        "GLM-4.7-Flash",
        {"num_hidden_layers": 47, "first_k_dense_replace": 1, "n_routed_experts": 64},
    ),
    Release(
        "LFM2.5 1.2B",
        "LFM2.5-1.2B",
        {
            "num_hidden_layers": 16,
            "layer_types": ["full_attention" if at in (2, 5, 8, 10, 12, 14) else "conv" for at in range(16)],
        },
    ),
)


def _llama(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, **others},
    }


BASES = (
    Release(
        "bundled 135M, float32",
        "Llama-3.2-3B",
        _llama(30, 576, 1536, 9, 3, head_dim=64, vocab_size=49152),
        bits=32,
    ),
    Release("Llama 3.2 1B, 4-bit", "Llama-3.2-3B", _llama(16, 2048, 8192, 32, 8, head_dim=64)),
    Release("Llama 3.2 3B, 4-bit", "Llama-3.2-3B", {"num_hidden_layers": 28}),
    Release("Llama 3.1 8B, 4-bit", "Llama-3.2-3B", _llama(32, 4096, 14336, 32, 8, tie_word_embeddings=False)),
    Release("Qwen3 8B, 4-bit", "Qwen3-8B", {"num_hidden_layers": 36}),
)


class Built:
    """A release as the server sees it. `family`: its model file. `weight_bytes`: of all weights.

    adapted: the linears that an adapter of the default targets changes.
    """

    def __init__(self, release: Release) -> None:
        config, self.name = release.config, release.name
        self.family: str = config["model_type"]
        module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(self.family, self.family)}")
        model = module.Model(module.ModelArgs.from_dict(config))

        def without_memory(array: mx.array) -> mx.array:
            is_number = mx.issubdtype(array.dtype, mx.floating)
            return mx.broadcast_to(mx.zeros((), release.dtype if is_number else array.dtype), array.shape)

        model.update(tree_map(without_memory, model.parameters()))
        mx.eval(model.parameters())
        self.weight_bytes = int(sum(array.size for _, array in tree_flatten(model.parameters())) * release.bits / 8)
        layout = adapter_layout(model.eval())
        plan = prepare(model)
        self.kept, self.adapted = plan.layout, layout.named((ALL_LINEAR,))
        bank = AdapterBank(layout, 0, 1, plan.layout.dtype)
        install_adapters(model, bank)
        self.footprint: Footprint = footprint_of(model, plan, bank)

    def row_bytes(self, tokens: int) -> int:
        """Keys, values and states of a row. A layer with a window keeps a block more than that."""
        numbers = sum(
            spec.kv_heads
            * (spec.head_dim_k + spec.head_dim_v)
            * (tokens if spec.window is None else min(tokens, spec.window + BLOCK_TOKENS))
            for spec in self.kept.attention.values()
        )
        return numbers * self.kept.dtype.size + self.kept.state_bytes

    def factors(self, rank: int) -> int:
        """Numbers of an adapter."""
        return sum(math.prod(each.a_shape(rank)) + math.prod(each.b_shape(rank)) for each in self.adapted)
