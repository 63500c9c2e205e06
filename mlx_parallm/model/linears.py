"""The linears that LoRA adapters may change, and how they are changed.

    adapter_layout     finds them: it builds passes, which are never computed, and looks which linears get every token
    install_adapters   replaces each by an `AdaptedLinear`, which reads the slots of the current forward from the
                       adapter bank's `ForwardContext`

In a tied model the embedding is the head too; an `AdaptedEmbedding` adds adapters to the logits only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import AdapterLayout, LinearSpec
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.experts import EXPERT_LINEARS, AdaptedExpertLinear, AdaptedExperts, IndexFormat
from mlx_parallm.model.packing import as_dense
from mlx_parallm.model.sharding import SummedLinear
from mlx_parallm.model.split import HeadModule, head_module_of

_LINEARS = (nn.Linear, nn.QuantizedLinear)
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_EXPERT_LAYERS = (SwitchGLU, SwitchMLP)
_TOKENS = (7, 11, 13)
"""Tokens of the traced passes. A linear that gets another number of them in one of these, such as an expert that a
model calls for its own tokens, does not know whose they are."""


# -- which linears -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Traced:
    """What a linear does in a pass. `x`: its first input, kept so that no later array has that id. `width`: of its
    output. `vectors`: how many it gives in all calls."""

    x: mx.array
    width: int
    vectors: int = 0


@dataclass(slots=True)
class _Trace:
    """The linears that a pass of `tokens` tokens calls, by path, in order. `used`: those with an array that the model
    reads or sets by itself, so that an `AdaptedLinear` cannot take their place. `within`: the one whose own code
    runs."""

    tokens: int
    called: dict[str, _Traced] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    within: str = ""

    def add(self, path: str, x: mx.array, y: mx.array) -> None:
        self.called.setdefault(path, _Traced(x, y.shape[-1])).vectors += y.size // y.shape[-1]

    def of_all_tokens(self, path: str) -> bool:
        """Whether the linear gets every token, or as many experts of each."""
        return path in self.called and not self.called[path].vectors % self.tokens


def adapter_layout(model: nn.Module, source: Path | None = None) -> AdapterLayout:
    """The linears that adapters may change: all that get every token of a pass, those of experts too, and the head.

    Linears that are called one after the other with the same input are a group. `AdapterLayout.refused` names the
    other modules that an adapter file might ask for, with the reason. `source`: where the model was read from.

    Raises:
        UnsupportedModelError: the model does not run.
    """
    with as_dense(model):
        return _layout(model, source)


def _layout(model: nn.Module, source: Path | None) -> AdapterLayout:
    modules, head = dict(model.named_modules()), head_module_of(model)
    traces = [_traced(model, modules, tokens) for tokens in _TOKENS]
    linears: dict[str, LinearSpec] = {}
    refused: dict[str, str] = {}
    groups, experts = _groups(traces[0]), _expert_layers(modules)
    for path in sorted(modules, key=_natural):
        if head is not None and path == head.path:
            continue
        if kind := _refusal(path, modules, traces):
            refused[path] = kind
        elif isinstance(modules[path], _LINEARS + EXPERT_LINEARS):
            linears[path] = _spec(path, modules, traces[0].called[path], groups[path], experts)
    head_spec = _head_spec(head, traces, refused)
    return AdapterLayout(linears, refused, len(model.layers), head_spec, source)


def _traced(model: nn.Module, modules: Mapping[str, nn.Module], tokens: int) -> _Trace:
    """Builds a pass of so many tokens. It is not computed, so weights that are not read yet stay so."""
    trace, kinds = _Trace(tokens), {}
    for path, module in modules.items():
        if type(module) in _LINEARS + EXPERT_LINEARS + _EMBEDDINGS:
            kinds[path] = type(module)
            module.__class__ = _watched(kinds[path], path, trace)
    try:
        model(mx.arange(tokens)[None], cache=make_prompt_cache(model))
    except Exception as error:  # the model file is foreign code
        raise UnsupportedModelError(f"this model does not run: {error}") from error
    finally:
        for path, kind in kinds.items():
            modules[path].__class__ = kind
    return trace


def _watched(kind: Any, path: str, trace: _Trace) -> Any:
    """A class that behaves as `kind`, and tells the trace how the module at `path` is used."""
    product = "as_linear" if kind in _EMBEDDINGS else "__call__"

    def own(name: str) -> Callable[..., mx.array]:
        def run(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            trace.within = path
            y: mx.array = getattr(kind, name)(self, x, *args, **kwargs)
            trace.within = ""
            if name == product:
                trace.add(path, x, y)
            return y

        return run

    def get(self: nn.Module, name: str) -> Any:
        if name in self and trace.within != path and kind not in EXPERT_LINEARS:
            trace.used.add(path)
        return kind.__getattr__(self, name)

    def put(self: nn.Module, name: str, value: Any) -> None:
        if name in self:
            trace.used.add(path)
        kind.__setattr__(self, name, value)

    methods = {name: own(name) for name in ("__call__", product)}
    return type(kind.__name__, (kind,), {**methods, "__getattr__": get, "__setattr__": put})


def _groups(trace: _Trace) -> dict[str, str]:
    """The group of each linear that is called, named after its first one."""
    groups: dict[str, str] = {}
    last: str | None = None
    for path, each in trace.called.items():
        same = last is not None and trace.called[last].x is each.x
        groups[path] = groups[last] if same and last is not None else path
        last = path
    return groups


def _expert_layers(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """The number of experts by the path of the module that has them, with its router and the experts' layer."""
    parts = ((path, part) for path, part in modules.items() if isinstance(part, EXPERT_LINEARS) and path.count(".") > 1)
    return {path.rsplit(".", 2)[0]: int(part.num_experts) for path, part in parts}


def _refusal(path: str, modules: Mapping[str, nn.Module], traces: list[_Trace]) -> str:
    """The kind of LoRA that is not supported on this module; "" if it may have an adapter, or has no own weights."""
    module, name = modules[path], path.rpartition(".")[2]
    if isinstance(module, _EMBEDDINGS):
        return "embedding LoRA"
    experts = isinstance(module, EXPERT_LINEARS)
    if experts and type(modules[path.rpartition(".")[0]]) not in _EXPERT_LAYERS:
        return "expert LoRA"
    if type(module) not in _LINEARS + EXPERT_LINEARS:
        return f"LoRA on {name}" if "weight" in module and module.weight.ndim == 2 else ""
    return _unfit(path, name, traces)


def _unfit(path: str, name: str, traces: list[_Trace]) -> str:
    """Why adapted code cannot take the place of a product, as a kind of LoRA; "" if it can."""
    if not all(trace.of_all_tokens(path) for trace in traces):
        return f"LoRA on {name}, which does not get all tokens,"
    return f"LoRA on {name}, whose weight the model reads by itself," if path in traces[0].used else ""


def _spec(
    path: str, modules: Mapping[str, nn.Module], traced: _Traced, group: str, experts: Mapping[str, int]
) -> LinearSpec:
    inputs, outputs = traced.x.shape[-1], traced.width
    if isinstance(modules[path], EXPERT_LINEARS):
        return LinearSpec(path, inputs, outputs, group, int(modules[path].num_experts), traced.vectors // _TOKENS[0])
    block = next((at for at in experts if path.startswith(f"{at}.")), None)
    return LinearSpec(path, inputs, outputs, group, is_router=block is not None and outputs in (1, experts[block]))


def _head_spec(head: HeadModule | None, traces: list[_Trace], refused: dict[str, str]) -> LinearSpec | None:
    if head is None:
        return None
    if kind := _unfit(head.module_path, "lm_head", traces):
        refused[head.path] = kind
        return None
    traced = traces[0].called[head.module_path]
    return LinearSpec(head.path, traced.x.shape[-1], traced.width, head.path)


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


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
