"""Models without weights in memory: the shapes and dtypes that a decode step on a Mac would read.

Only their graphs can be built, inside `gpu_graphs`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models import llama, qwen3, qwen3_5

from benchmarks.lib.step.graph import Kind, placeholder
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.app import device
from mlx_parallm.batch.attention import AttentionChoice
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import Config, ServerConfig
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.model.cache_plan import CachePlan, prepare
from mlx_parallm.model.families import Family, family_of
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import JoinedLinears, install_adapters

RANK = 16
SLOTS = 8
_KV_BYTES = 1 << 40
_DENSE_ROWS = 1
"""What a GPU is assumed to measure: dense attention is faster for one row, and other attention for several."""
_FAMILIES: dict[str, Any] = {"llama": llama, "qwen3": qwen3, "qwen3_5": qwen3_5}
_HEADS = ("lm_head.", "embed_tokens.")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The configuration of a model.

    bits, head_bits: of the layers' weights, and of the embedding and head; None if they are not quantized
    dtype: of activations, keys and values, and scales
    family: mlx-lm's module of the model; `more` are further fields of its configuration
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: mx.Dtype
    group_size: int = 64
    bits: int | None = None
    head_bits: int | None = None
    tied: bool = False
    family: str = "llama"
    more: tuple[tuple[str, Any], ...] = ()

    def model(self) -> nn.Module:
        """The model as mlx-lm makes it."""
        module = _FAMILIES[self.family]
        fields = {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": self.tied,
            **dict(self.more),
        }
        return module.Model(module.ModelArgs.from_dict(fields | {"text_config": fields}))


TINY = Architecture("tiny llama", 2, 64, 96, 4, 2, 263, mx.float32)
BUNDLED = Architecture("bundled model, 4-bit", 30, 576, 1536, 9, 3, 49152, mx.float32, 32, 4, 8, tied=True)
LLAMA_1B = Architecture("Llama-3.2-1B, 4-bit", 16, 2048, 8192, 32, 8, 128256, mx.bfloat16, 64, 4, 4, tied=True)
_QWEN3 = (("head_dim", 128), ("rope_theta", 1e6))
QWEN3_8B = Architecture(
    "Qwen3-8B, 4-bit", 36, 4096, 12288, 32, 8, 151936, mx.bfloat16, 64, 4, 4, False, "qwen3", _QWEN3
)
_HYBRID = (
    ("head_dim", 256),
    ("full_attention_interval", 4),
    ("linear_num_value_heads", 32),
    ("linear_num_key_heads", 16),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
)
HYBRID_4B = Architecture(
    "Qwen3.5-4B, 4-bit", 32, 2560, 9216, 16, 4, 248320, mx.bfloat16, 64, 4, 4, True, "qwen3_5", _HYBRID
)
LLAMA_8B = Architecture("Llama-3.1-8B, 4-bit", 32, 4096, 14336, 32, 8, 128256, mx.bfloat16, 64, 4, 4)


@dataclass(frozen=True, slots=True)
class NoSpecialTokens:
    """What `build_runner` reads of a tokenizer, of one whose tokens are all text."""

    special_ids: frozenset[int] = frozenset()
    tool_format: None = None
    reasoning: None = None


@dataclass(frozen=True, slots=True)
class ShapedModel:
    """What `build_runner` reads of a `SharedModelManager`, of a model without weights."""

    model: nn.Module
    plan: CachePlan
    card: ModelCard
    family: Family
    bank: AdapterBank
    tokenizer: NoSpecialTokens = NoSpecialTokens()
    split: None = None


def build(architecture: Architecture) -> ShapedModel:
    """The model with placeholders for weights, as this server loads it."""
    model = plain(architecture)
    plan = prepare(model)
    card = ModelCard(
        name=architecture.name,
        context_length=8192,
        vocab_size=plan.vocab_size,
        quantization="none" if architecture.bits is None else f"{architecture.bits}-bit",
        dtype=str(architecture.dtype),
        parameters=0,
        weight_bytes=0,
    )
    return ShapedModel(model, plan, card, family_of(model), _filled_bank(model, plan.layout.dtype))


def plain(architecture: Architecture) -> nn.Module:
    """The model with placeholders for weights, as mlx-lm loads it."""
    model = architecture.model()
    model.set_dtype(architecture.dtype)
    if architecture.bits is not None:
        nn.quantize(model, class_predicate=partial(_quantization, architecture))
    model.update(tree_map_with_path(_placed, model.parameters()))
    model.eval()
    return model


def parameters(architecture: Architecture) -> int:
    """How many there are, as a model's card counts them."""
    return nn.utils.tree_reduce(lambda total, array: total + array.size, architecture.model().parameters(), 0)


def runner_of(shaped: ShapedModel, kernel: bool = False) -> BatchRunner:
    """A new runner. Its KV pool has room for the rows of any case. `kernel`: several rows attend in its kernel."""
    with patch.object(device, "prove_once"):  # there are no weights
        runner = device.build_runner(shaped, shaped.bank, Config(server=ServerConfig(kv_cache_memory=_KV_BYTES)))
    runner.attention = AttentionChoice(_DENSE_ROWS, kernel)
    return runner


def _filled_bank(model: nn.Module, dtype: mx.Dtype) -> AdapterBank:
    """A bank whose slots all hold adapters of all linears of the layers, except those of experts."""
    bank = AdapterBank(adapter_layout(model), SLOTS, RANK, dtype)
    with patch.object(mx, "eval"):  # the arrays of linears that are joined take memory otherwise
        install_adapters(model, bank)
    model.update(tree_map_with_path(_placed, model.parameters()))
    for group in bank.groups.values():
        if isinstance(group.joined, JoinedLinears):
            linear = group.joined.linear
            linear.update(tree_map_with_path(_placed, linear.parameters()))
        specs = [spec for spec in group.specs.values() if spec.path in bank.layout.linears and not spec.experts]
        if not specs:  # those of the head, or of experts
            continue
        group.written = dict.fromkeys(range(1, SLOTS + 1), RANK)
        group.rank = RANK
        group.add_places(spec.path for spec in specs)
        a = specs[0].in_features, len(specs) * RANK
        group.a = placeholder((SLOTS + 1, *a), dtype, Kind.ADAPTERS)
        group.b = placeholder((SLOTS + 1, len(group.places_of_tiles), RANK, group.width), dtype, Kind.ADAPTERS)
        for slot in group.written:  # as after a pass that has used the slot alone
            b = [placeholder((RANK, spec.out_features), dtype, Kind.ADAPTERS) for spec in specs]
            group.kept[slot] = placeholder(a, dtype, Kind.ADAPTERS), b
    return bank


def _quantization(architecture: Architecture, path: str, part: nn.Module) -> bool | dict[str, Any]:
    if not hasattr(part, "to_quantized"):
        return False
    bits = architecture.head_bits if _is_head(path) else architecture.bits
    return {"group_size": architecture.group_size, "bits": bits}


def _placed(path: str, array: mx.array) -> mx.array:
    return placeholder(array.shape, array.dtype, Kind.HEAD if _is_head(path) else Kind.WEIGHTS)


def _is_head(path: str) -> bool:
    return any(head in f"{path}." for head in _HEADS)
