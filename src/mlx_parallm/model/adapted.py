"""Multi-adapter linears: the base's own linear, plus what the forward's context says of each row's adapter."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.layout import AdapterLayout, LinearSpec
from mlx_parallm.model.families import Family, Standing

_BLOCKS = frozenset({"self_attn", "mlp"})
"""Parts of a transformer block whose linears adapters may change, as the proved families name them."""
_SHARED_INPUT = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


class AdaptedLinear(nn.Module):  # type: ignore[misc]
    """A linear of the base model with its place in the bank. Its base runs alone when no row has an adapter."""

    def __init__(self, base: nn.Module, bank: AdapterBank, spec: LinearSpec) -> None:
        super().__init__()
        self.base = base
        self._bank = bank
        self._group = bank.groups[spec.group]
        self.path = spec.path

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, in] → [B, T, out]."""
        y: mx.array = self.base(x)
        context = self._bank.context
        return y if context is None else context.adapt(self._group, self.path, x, y)


def adapter_layout(model: nn.Module, family: Family) -> AdapterLayout:
    """The model's linears that adapters may change: attention and MLP of proved families, experts and router apart."""
    proved = family.standing is Standing.PROVED
    linears: dict[str, LinearSpec] = {}
    refused: dict[str, str] = {}
    for path, module in model.named_modules():
        kind = _refusal(path, module) if proved else f"LoRA on a {family.name} model"
        if kind:
            refused[path] = kind
        elif isinstance(module, nn.Linear | nn.QuantizedLinear):
            linears[path] = _spec(path, module)
    ordered = dict(sorted(linears.items(), key=lambda item: _natural(item[0])))
    return AdapterLayout(ordered, refused, layers=len(model.layers))


def install_adapters(model: nn.Module, bank: AdapterBank) -> None:
    """Puts an AdaptedLinear in the place of every linear of the bank's layout. Weights are not copied."""
    modules = dict(model.named_modules())
    adapted = [(path, AdaptedLinear(modules[path], bank, spec)) for path, spec in bank.layout.linears.items()]
    model.update_modules(tree_unflatten(adapted))


def _refusal(path: str, module: nn.Module) -> str:
    """What an adapter of this module would be; "" for modules that may have one, or have no weights of their own."""
    if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
        return "expert LoRA"  # SwitchGLU sorts tokens by expert, which loses the row
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return "embedding LoRA"
    if not isinstance(module, nn.Linear | nn.QuantizedLinear):
        return ""
    *_, block, name = path.split(".")[-2:] if "." in path else ("", path)
    if block not in _BLOCKS:
        return "head LoRA" if name == "lm_head" else f"LoRA on {name}"
    return "router LoRA" if name == "gate" else ""


def _spec(path: str, linear: nn.Module) -> LinearSpec:
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    parent, _, name = path.rpartition(".")
    return LinearSpec(path, inputs, outputs, f"{parent}.{_SHARED_INPUT.get(name, name)}")


def _natural(path: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]
