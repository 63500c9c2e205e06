"""The changes made to a loaded mlx-lm model: an attention hook, mixers of recurrent layers that take packed tokens (see
`recurrent`), and linears that add each row's LoRA adapter.

Attention: mlx-lm's model files call `scaled_dot_product_attention(q, k, v, cache=…, scale=…, mask=…)` by a name of
their own module. `install_hook` rebinds that name, once, to a function that calls `cache.attend` if the cache has that
method, and mlx-lm's own function otherwise. Nothing else of mlx-lm is patched.

Linears: `install_adapters` replaces each linear that adapters may change by an `AdaptedLinear`, which reads the slots
of the current forward from the adapter bank's `ForwardContext`. In a tied model the embedding is the head too; an
`AdaptedEmbedding` adds adapters to the logits only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterLayout, LinearSpec
from mlx_parallm.model.experts import EXPERT_LINEARS, AdaptedExpertLinear, AdaptedExperts, IndexFormat
from mlx_parallm.model.families import Support, classify
from mlx_parallm.model.recurrent import MIXERS, install_mixers
from mlx_parallm.model.sharding import SummedLinear
from mlx_parallm.model.split import head_module_of

_ATTENTION = "scaled_dot_product_attention"
_BLOCKS = frozenset({"self_attn", "mlp", "feed_forward", "block_sparse_moe", "shared_expert", *MIXERS.values()})
"""Names of the parts of a layer whose linears adapters may change, in all tested families. Those of experts are in a
`SwitchGLU` inside them."""
_ROUTERS = frozenset({"gate", "shared_expert_gate"})
"""Names of linears that choose experts, or weigh what the shared one gives."""
_CHOSEN = ("top_k", "num_experts_per_tok")
"""mlx-lm's names of the number of experts that a token uses, in the module that has the experts."""
_SHARED_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up"),
    **dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), "in_proj"),
}
"""Linears that read the same input belong to one group, so that the bank multiplies that input once."""


# -- attention -----------------------------------------------------------------------------------


class AttentionStyle(Enum):
    """Which code computes a model's attention, and the shape of the scores if it is the model's own code."""

    HOOKED = "by the cache"
    OWN = "by the model, scores [B, heads, T, S]"
    OWN_GROUPED = "by the model, scores [B, kv_heads, group, T, S]"


def install_hook(model: nn.Module) -> AttentionStyle:
    """Rebinds the attention function in every Python module that defines a part of `model`, and installs the mixers of
    its recurrent layers.

    Models with attention code of their own, such as gemma2, call no such function; their caches must return the keys
    and values.
    """
    hooked = install_mixers(model)
    for name in {type(part).__module__ for part in model.modules()}:
        module = sys.modules.get(name)
        original = getattr(module, _ATTENTION, None)
        if original is None or name.startswith("mlx."):
            continue
        if not hasattr(original, "hooked"):
            setattr(module, _ATTENTION, _dispatcher(original))
        hooked = True
    if hooked:
        return AttentionStyle.HOOKED
    grouped = any(getattr(part, "repeats", 1) > 1 for part in model.modules())
    return AttentionStyle.OWN_GROUPED if grouped else AttentionStyle.OWN


def _dispatcher(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        attend = getattr(cache, "attend", None)
        if attend is None:
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return attend(queries, scale, mask, sinks)  # type: ignore[no-any-return]

    attention.hooked = True  # type: ignore[attr-defined]
    return attention


# -- adapted linears -----------------------------------------------------------------------------


class AdaptedLinear(nn.Module):  # type: ignore[misc]
    """A linear of the base model that adds the LoRA product of each row's adapter. Without any, only `base` runs."""

    def __init__(self, base: nn.Module, bank: AdapterBank, spec: LinearSpec) -> None:
        super().__init__()
        self.base = base
        self._bank = bank
        self._group = bank.groups[spec.group]
        self.path = spec.path

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, in] → [B, T, out]."""
        return self._adapted(x, self.base(x))

    def _adapted(self, x: mx.array, y: mx.array) -> mx.array:
        context = self._bank.context
        return y if context is None else context.adapt(self._group, self.path, x, y)


class AdaptedSummedLinear(AdaptedLinear):
    """A linear that is split by input among ranks. Each adds its part of the LoRA product before the ranks' outputs are
    added."""

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, in / ranks] → [B, T, out]."""
        return cast(mx.array, self.base.total(self._adapted(x, self.base.part(x))))


class AdaptedEmbedding(AdaptedLinear):
    """The embedding of a tied model. As the head it adds the product of each row's adapter; looking up tokens does
    not."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Token ids [B, T] → [B, T, hidden]."""
        return cast(mx.array, self.base(tokens))

    def as_linear(self, x: mx.array) -> mx.array:
        """[B, T, hidden] → [B, T, vocab]."""
        return self._adapted(x, self.base.as_linear(x))


def adapter_layout(model: nn.Module, source: Path | None = None) -> AdapterLayout:
    """The linears that adapters may change: in tested families, those of attention, MLP, experts and router, and the
    head.

    `AdapterLayout.refused` names the other modules that an adapter file might ask for, with the reason. `source`: where
    the model was read from.
    """
    family, head = classify(model), head_module_of(model)
    tested = family.support is Support.TESTED
    linears: dict[str, LinearSpec] = {}
    refused: dict[str, str] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if tested and head is not None and path == head.path:
            continue
        kind = _refusal(path, modules) if tested else f"LoRA on a {family.name} model"
        if kind:
            refused[path] = kind
        elif isinstance(module, EXPERT_LINEARS):
            linears[path] = _expert_spec(path, modules)
        elif isinstance(module, nn.Linear | nn.QuantizedLinear):
            linears[path] = _spec(path, module)
    ordered = dict(sorted(linears.items(), key=lambda item: _natural(item[0])))
    head_spec = None if head is None or not tested else _spec(head.path, head.module)
    if head is not None and not tested:
        refused[head.path] = f"LoRA on a {family.name} model"
    return AdapterLayout(ordered, refused, len(model.layers), head_spec, source)


def install_adapters(model: nn.Module, bank: AdapterBank) -> None:
    """Replaces every linear of the bank's layout by an adapted one. Weights are shared, not copied."""
    modules, layout = dict(model.named_modules()), bank.layout
    linears = [spec for spec in layout.linears.values() if not spec.experts]
    adapted: list[tuple[str, nn.Module]] = [
        (each.path, _adapted_kind(modules[each.path])(modules[each.path], bank, each)) for each in linears
    ]
    head = head_module_of(model)
    if layout.head is not None and head is not None:
        kind = AdaptedEmbedding if head.tied else AdaptedLinear
        adapted.append((head.module_path, kind(head.module, bank, layout.head)))
    model.update_modules(tree_unflatten(adapted))
    _install_expert_adapters(model, modules, bank)


def _adapted_kind(linear: nn.Module) -> type[AdaptedLinear]:
    return AdaptedSummedLinear if isinstance(linear, SummedLinear) else AdaptedLinear


def _install_expert_adapters(model: nn.Module, modules: Mapping[str, nn.Module], bank: AdapterBank) -> None:
    layers: dict[str, list[LinearSpec]] = {}
    for spec in bank.layout.linears.values():
        if spec.experts:
            layers.setdefault(spec.path.rpartition(".")[0], []).append(spec)
    for path, specs in layers.items():
        layer, indices = modules[path], IndexFormat()
        for spec in specs:
            layer[spec.target] = AdaptedExpertLinear(modules[spec.path], bank, spec, indices)
        model.update_modules(tree_unflatten([(path, AdaptedExperts(layer, bank, specs, indices))]))


def _refusal(path: str, modules: Mapping[str, nn.Module]) -> str:
    """The kind of LoRA that is not supported on this module; "" if it may have an adapter, or has no own weights."""
    module = modules[path]
    if isinstance(module, EXPERT_LINEARS):
        return "" if type(modules[path.rpartition(".")[0]]) is SwitchGLU else "expert LoRA"
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return "embedding LoRA"
    if not isinstance(module, nn.Linear | nn.QuantizedLinear):
        return ""
    *_, block, name = path.split(".")[-2:] if "." in path else ("", path)
    return "" if block in _BLOCKS else f"LoRA on {name}"


def _spec(path: str, linear: nn.Module) -> LinearSpec:
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear | nn.QuantizedEmbedding):
        inputs = inputs * 32 // linear.bits
    return LinearSpec(path, inputs, outputs, _group(path), is_router=path.rpartition(".")[2] in _ROUTERS)


def _expert_spec(path: str, modules: Mapping[str, nn.Module]) -> LinearSpec:
    linear, block = modules[path], modules[path.rsplit(".", 2)[0]]
    experts = int(linear.num_experts)
    chosen = next((int(getattr(block, name)) for name in _CHOSEN if hasattr(block, name)), experts)
    return LinearSpec(path, int(linear.input_dims), int(linear.output_dims), _group(path), experts, chosen)


def _group(path: str) -> str:
    parent, _, name = path.rpartition(".")
    return f"{parent}.{_SHARED_INPUT.get(name, name)}"


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]
