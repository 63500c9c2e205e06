"""The linears that LoRA adapters may change, and how they are changed.

    adapter_layout     finds them: it traces passes, and looks which linears get every token
    install_adapters   replaces each by an `AdaptedLinear`, which reads the slots of the current forward from the
                       adapter bank's `ForwardContext`

The head is the module whose product is the logits. In a tied model that is the embedding; an `AdaptedEmbedding` adds
adapters to the logits only. Multi-head latent attention (arXiv 2405.04434) has a linear from latents to the keys and
values of all heads. mlx-lm keeps it as two modules with one matrix per head; both become `AdaptedHeads`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_parallm.adapters.bank import AdapterBank, LinearGroup
from mlx_parallm.adapters.forward_context import BaseProduct, HeadsCall
from mlx_parallm.adapters.weights import AdapterLayout, HeadParts, LinearSpec
from mlx_parallm.model.device import CPULinear
from mlx_parallm.model.experts import EXPERT_LINEARS, AdaptedExpertLinear, AdaptedExperts, IndexFormat
from mlx_parallm.model.hooks import InPart, answering
from mlx_parallm.model.names import transformers_paths
from mlx_parallm.model.packing import as_dense
from mlx_parallm.model.split import owner_of
from mlx_parallm.model.trace import EMBEDDINGS, HEAD_LINEARS, LINEARS, Product, Trace, traced

_EXPERT_LAYERS = (SwitchGLU, SwitchMLP)
_TOKENS = (7, 11, 13)
"""Tokens of the traced passes. A linear that gets another number of them in one of these, such as an expert that a
model calls for its own tokens, does not know whose they are."""
_TILE = 8
"""Linears of a group have outputs that this divides, so that their factors fall into few tiles of the same width."""
_JOINABLE = (nn.Linear, nn.QuantizedLinear, CPULinear)
_ARRAYS = ("weight", "scales", "biases", "bias")
"""The arrays of a linear, whose first axis is that of its outputs."""
_HEAD = "lm_head"
_KEYS_AND_VALUES = "kv_b_proj"
"""Transformers' name for the linear from latents to the keys and values of all heads."""


# -- which linears -------------------------------------------------------------------------------


def adapter_layout(model: nn.Module, source: Path | None = None) -> AdapterLayout:
    """The linears that adapters may change: all that get every token of a pass, those of experts too, and the head.

    Linears that are called one after the other with the same input are a group, except for those of odd widths.
    `AdapterLayout.refused` names the other modules that an adapter file might ask for, with the reason. `source`: where
    the model was read from.

    Raises:
        UnsupportedModelError: the model does not run.
    """
    with as_dense(model):
        return _layout(model, source)


def _layout(model: nn.Module, source: Path | None) -> AdapterLayout:
    modules = dict(model.named_modules())
    traces = [traced(model, modules, tokens) for tokens in _TOKENS]
    linears: dict[str, LinearSpec] = {}
    refused: dict[str, str] = {}
    head = _head(model, modules, traces, refused)
    groups, experts = _groups(traces[0]), _expert_layers(modules)
    for path in sorted(modules, key=_natural):
        if head is not None and path == head.path:
            continue
        if kind := _refusal(path, modules, traces):
            refused[path] = kind
        elif isinstance(modules[path], LINEARS + EXPERT_LINEARS):
            linears[path] = _spec(path, modules, traces[0].called[path], groups[path], experts)
    for spec in _heads(modules, traces[0]):
        if kind := next(filter(None, (_unfit(at, spec.target, traces) for at in spec.modules)), ""):
            refused[spec.path] = kind
        else:
            linears[spec.path] = spec
    still = traces[0].without_gradient
    in_order = {path: linears[path] for path in sorted(linears, key=_natural)}
    for path, spec in in_order.items():
        if still.issuperset(spec.modules):
            in_order[path] = replace(spec, chooses=True)
    return AdapterLayout(in_order, refused, len(model.layers), head, source, transformers_paths(model, in_order))


def _groups(trace: Trace) -> dict[str, str]:
    """The group of each linear that is called, named after its first one."""
    groups: dict[str, str] = {}
    last: str | None = None
    for path, each in trace.called.items():
        same = last is not None and trace.called[last].x is each.x
        groups[path] = groups[last] if same and last is not None else path
        last = path
    return groups


def _expert_layers(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """The number of experts by the path of the module that has them and their router. That is the one around the
    experts' layer, or the next one if there is no other linear in it."""
    found: dict[str, int] = {}
    plain = [path for path, part in modules.items() if isinstance(part, LINEARS)]
    for path, part in modules.items():
        if isinstance(part, EXPERT_LINEARS) and path.count(".") > 1:
            at = path.rsplit(".", 2)[0]
            if not any(each.startswith(f"{at}.") for each in plain):
                at = at.rpartition(".")[0]
            found[at] = int(part.num_experts)
    return found


def _refusal(path: str, modules: Mapping[str, nn.Module], traces: list[Trace]) -> str:
    """The kind of LoRA that is not supported on this module; "" if it may have an adapter, or has no own weights."""
    module, name = modules[path], path.rpartition(".")[2]
    if isinstance(module, EMBEDDINGS):
        return "embedding LoRA"
    experts = isinstance(module, EXPERT_LINEARS)
    if experts and type(modules[path.rpartition(".")[0]]) not in _EXPERT_LAYERS:
        return "expert LoRA"
    if type(module) not in LINEARS + EXPERT_LINEARS:
        is_matrix = "weight" in module and module.weight.ndim == 2
        return f"LoRA on {name}, which is no linear but a {type(module).__name__}," if is_matrix else ""
    return _unfit(path, name, traces)


def _unfit(path: str, name: str, traces: list[Trace]) -> str:
    """Why adapted code cannot take the place of a product, as a kind of LoRA; "" if it can."""
    if not all(trace.of_all_tokens(path) for trace in traces):
        return f"LoRA on {name}, which does not get all tokens,"
    return f"LoRA on {name}, whose weight the model reads by itself," if path in traces[0].used else ""


def _spec(
    path: str, modules: Mapping[str, nn.Module], product: Product, group: str, experts: Mapping[str, int]
) -> LinearSpec:
    inputs, outputs = product.x.shape[-1], product.width
    if isinstance(modules[path], EXPERT_LINEARS):
        return LinearSpec(path, inputs, outputs, group, int(modules[path].num_experts), product.vectors // _TOKENS[0])
    block = next((at for at in experts if path.startswith(f"{at}.")), None)
    group = path if outputs % _TILE else group
    return LinearSpec(path, inputs, outputs, group, chooses=block is not None and outputs in (1, experts[block]))


def _heads(modules: Mapping[str, nn.Module], trace: Trace) -> Iterator[LinearSpec]:
    """The linears from latents to the keys and values of all heads. Of the two modules that do the work of each, a pass
    of several tokens uses the one of the keys transposed, because a pass of one token multiplies queries by it."""
    paths = [path for path in trace.called if isinstance(modules[path], HEAD_LINEARS)]
    values_in = {path.rpartition(".")[0]: path for path in paths if not trace.called[path].transposed}
    for keys in paths:
        parent = keys.rpartition(".")[0]
        if trace.called[keys].transposed and parent in values_in:
            of_keys, of_values = trace.called[keys], trace.called[values_in[parent]]
            parts = HeadParts(keys, values_in[parent], len(modules[keys].weight), of_keys.width)
            path, outputs = f"{parent}.{_KEYS_AND_VALUES}", parts.heads * (of_keys.width + of_values.width)
            yield LinearSpec(path, of_values.x.shape[-1], outputs, path, parts=parts)


def _head(
    model: nn.Module, modules: Mapping[str, nn.Module], traces: list[Trace], refused: dict[str, str]
) -> LinearSpec | None:
    """The linear that makes logits. If it cannot be adapted, it is refused. In a tied model it has the path that
    Transformers gives it."""
    at, tied = traces[0].head, _HEAD if owner_of(model) is model else f"language_model.{_HEAD}"
    if at is None:
        refused[tied] = f"LoRA on {_HEAD}, whose weight the model reads by itself,"
        return None
    embedding = at if isinstance(modules[at], EMBEDDINGS) else ""
    path, product = tied if embedding else at, traces[0].called[at]
    if kind := _unfit(at, path.rpartition(".")[2], traces):
        refused[path] = kind
        return None
    return LinearSpec(path, product.x.shape[-1], product.width, path, embedding=embedding)


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


# -- adapted linears -----------------------------------------------------------------------------


class AdaptedLinear(nn.Module):  # type: ignore[misc]
    """A linear of the base model that adds the LoRA product of each row's adapter. Without any, only `base` runs.

    `base_product`: that of `base`, which may be a part of one for several linears.
    """

    def __init__(self, base: nn.Module, bank: AdapterBank, spec: LinearSpec) -> None:
        super().__init__()
        self.base = base
        self.base_product: BaseProduct = base.__call__
        self._bank = bank
        self._group = bank.groups[spec.group]
        self.path = spec.path

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, in] → [B, T, out]."""
        context = self._bank.context
        base = self.base_product
        return base(x) if context is None else context.adapt(self._group, self.path, x, base)

    def adapted(self, x: mx.array, base: BaseProduct) -> mx.array:
        """What `base` gives for x, with the LoRA product of each row's adapter."""
        context = self._bank.context
        return base(x) if context is None else context.adapt(self._group, self.path, x, base)


class AdaptedEmbedding(AdaptedLinear):
    """The embedding of a tied model. As the head it adds the product of each row's adapter; looking up tokens does
    not."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Token ids [B, T] → [B, T, hidden]."""
        return cast(mx.array, self.base(tokens))

    def as_linear(self, x: mx.array) -> mx.array:
        """[B, T, hidden] → [B, T, vocab]."""
        return self.adapted(x, self.base.as_linear)


class AdaptedHeads(AdaptedLinear):
    """One of the two modules that do the work of a linear from latents to the keys and values of all heads.

    `pair`: both.

    Args:
        parts: of the linear.
        at: the path of the module.
    """

    pair: LatentHeads

    def __init__(self, base: nn.Module, bank: AdapterBank, spec: LinearSpec, parts: HeadParts, at: str) -> None:
        super().__init__(base, bank, spec)
        self._heads, self._columns = parts.heads, parts.columns(at)
        self._is_of_keys = at == parts.keys

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """[B, heads, T, in] → [B, heads, T, out], or back without `transpose`. Latents may have one head for all."""
        asked = answering()
        if asked is None or isinstance(asked, InPart) or not asked.takes_heads:
            return self.product(x, transpose)
        if self._is_of_keys:
            asked.heads = self.pair
        return x

    def product(self, x: mx.array, transpose: bool = True) -> mx.array:
        """The same, whatever the attention of the pass takes."""
        y, context = self._of_base(x, transpose), self._bank.context
        if context is None:
            return y
        call = HeadsCall(x, self._heads, self._columns, transpose == self._is_of_keys)
        return context.adapt_heads(self._group, self.path, call, y)

    def _of_base(self, x: mx.array, transpose: bool) -> mx.array:
        """The product of the base model. The tokens of a packed pass, [N, heads, 1, in], become the rows of one
        product for each head; as N products of one row they would take the time to read its matrix N times."""
        if len(x) == 1 or x.shape[2] > 1:
            return cast(mx.array, self.base(x, transpose))
        return cast(mx.array, self.base(x.swapaxes(0, 2), transpose).swapaxes(0, 2))


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The linear from latents to the keys and values of all heads: its two modules.

    absorbed   queries are multiplied by the module of keys, outputs by that of values; attention is over latents
    expanded   latents are multiplied by both, and attention is over keys and values of each head
    """

    bank: AdapterBank
    spec: LinearSpec
    parts: HeadParts
    keys: AdaptedHeads
    values: AdaptedHeads

    def is_expanded(self, tokens: int, seen: int, width: int) -> bool:
        """Whether it is less work to expand what so many tokens of a row see, keys of this width. To absorb is to
        multiply the tokens by the same matrices instead, and to attend with wider vectors."""
        latent, of_head = self.spec.in_features, self.spec.out_features // self.parts.heads
        wider = 2 * width - (width - latent + of_head)
        return (seen - tokens) * latent * of_head < tokens * seen * wider

    def expanded(self, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Keys [n, 1, T, latent ++ part with positions] → keys and values [n, heads, T, head_dim]."""
        latents, positions = mx.split(keys, [self.spec.in_features], -1)
        own = self.keys.product(latents, transpose=False)
        positions = mx.broadcast_to(positions, (*own.shape[:3], positions.shape[-1]))
        return mx.concatenate([own, positions], -1), self.values.product(latents)

    def absorbed(self, queries: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        """Attention of queries [n, heads, T, head_dim], whose part with positions is last, by attention of queries of
        latents."""
        own, positions = mx.split(queries, [self.parts.key_width], -1)
        outputs = attend(mx.concatenate([self.keys.product(own), positions], -1))
        return self.values.product(outputs[..., : self.spec.in_features])


def install_adapters(model: nn.Module, bank: AdapterBank) -> None:
    """Replaces every linear of the bank's layout by an adapted one. Weights are shared, not copied."""
    modules = dict(model.named_modules())
    plain = [spec for spec in bank.layout if not spec.experts]
    adapted = dict(each for spec in plain for each in _adapted(spec, modules, bank))
    model.update_modules(tree_unflatten(list(adapted.items())))
    for group in bank.groups.values():
        _join([adapted[path] for path in group.specs if path in adapted], group)
    _install_expert_adapters(model, modules, bank)


class JoinedLinears:
    """Linears of the base model that get the same input, as one product. Their arrays become parts of larger ones.

    The first of them that is called with an input computes the outputs of all, and the others take theirs.

    `linear`: one of all their outputs, in order.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        *starts, _ = accumulate(len(linear.weight) for linear in linears)
        self._starts = starts
        self.linear = copy(linears[0])
        for name in _ARRAYS:
            if name in linears[0]:
                self.linear[name] = mx.concatenate([linear[name] for linear in linears])
                mx.eval(self.linear[name])
                for linear, part in zip(linears, mx.split(self.linear[name], starts), strict=True):
                    linear[name] = part
        self._x: mx.array | None = None
        self._left: dict[int, mx.array] = {}

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → the outputs of all linears, in order."""
        return cast(mx.array, self.linear(x))

    def of_one(self, x: mx.array, place: int) -> mx.array:
        """[..., in] → the outputs of one linear."""
        if self._x is not x or place not in self._left:
            self._x, self._left = x, dict(enumerate(mx.split(self(x), self._starts, axis=-1)))
        part = self._left.pop(place)
        if not self._left:
            self._x = None
        return part


def _join(linears: Sequence[AdaptedLinear], group: LinearGroup) -> None:
    """Joins the linears of a group, if there are several and one product can be theirs."""
    if len(linears) < 2 or len({_kind_of_product(linear) for linear in linears}) > 1:
        return
    if type(linears[0]) is AdaptedLinear and type(linears[0].base) in _JOINABLE:
        joined = JoinedLinears([linear.base for linear in linears])
        group.joined = joined
        for place, linear in enumerate(linears):
            linear.base_product = partial(joined.of_one, place=place)


def _kind_of_product(linear: AdaptedLinear) -> tuple[object, ...]:
    """What has to be the same in linears that are joined."""
    base = linear.base
    arrays = tuple((name, base[name].dtype, base[name].shape[1:]) for name in _ARRAYS if name in base)
    quantized = tuple(getattr(base, name, None) for name in ("bits", "group_size", "mode"))
    return type(linear), type(base), arrays, quantized


def _adapted(
    spec: LinearSpec, modules: Mapping[str, nn.Module], bank: AdapterBank
) -> Iterator[tuple[str, AdaptedLinear]]:
    """The adapted modules that do the work of a linear, with their paths."""
    if spec.parts is not None:
        keys, values = (AdaptedHeads(modules[at], bank, spec, spec.parts, at) for at in spec.modules)
        keys.pair = values.pair = LatentHeads(bank, spec, spec.parts, keys, values)
        yield from zip(spec.modules, (keys, values), strict=True)
        return
    for at in spec.modules:
        base = modules[at]
        if spec.embedding:
            yield at, AdaptedEmbedding(base, bank, spec)
        else:
            yield at, getattr(base, "adapted_kind", AdaptedLinear)(base, bank, spec)


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
