"""Linears that add the LoRA product of each sequence's adapter.

`install_adapters` puts them in place of the linears of a bank's layout (see `layout`). They read the slots of the
current forward from the bank's `ForwardContext`. In a tied model, an `AdaptedEmbedding` adds adapters to the logits
only. The two modules of multi-head latent attention (arXiv 2405.04434) become `AdaptedHeads`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_parallm.adapters.bank import AdapterBank, LinearGroup
from mlx_parallm.adapters.forward_context import BaseProduct, ExpertCall, HeadsCall
from mlx_parallm.adapters.weights import HeadParts, LinearSpec
from mlx_parallm.model.device import CPULinear
from mlx_parallm.model.hooks import InPart, answering

_JOINABLE = (nn.Linear, nn.QuantizedLinear, CPULinear)
_ARRAYS = ("weight", "scales", "biases", "bias")
"""The arrays of a linear, whose first axis is that of its outputs."""


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


# -- experts -------------------------------------------------------------------------------------
#
# mlx-lm's `SwitchGLU` gets the experts that the router chose for each token, sorts the pairs of a token and an expert
# by expert, and calls its linears with the sorted experts; so these do not know whose token a pair is. Here a token's
# adapter travels with its experts: the indices that are sorted are
#
#     expert · adapters + number of the token's adapter
#
# which are in the order of experts still. The linears take both numbers out of an index again.


class IndexFormat:
    """What the indices mean that the linears of a layer of experts get: `adapters` is the number of adapters in them;
    None if they are experts alone, because no adapter changes the layer in this call."""

    def __init__(self) -> None:
        self.adapters: int | None = None
        self._last: tuple[mx.array, mx.array, mx.array] | None = None

    @contextmanager
    def of(self, adapters: int) -> Iterator[None]:
        """While the block runs, indices contain so many adapters."""
        self.adapters = adapters
        try:
            yield
        finally:
            self.adapters = self._last = None

    def split(self, indices: mx.array, adapters: int) -> tuple[mx.array, mx.array]:
        """The experts and the adapters of indices. They are computed once for linears that get the same indices."""
        if self._last is None or self._last[0] is not indices:
            self._last = (indices, *mx.divmod(indices, adapters))
        return self._last[1:]


class AdaptedExperts(nn.Module):  # type: ignore[misc]
    """A `SwitchGLU` that tells its linears which adapter each token uses. Without an adapter, only `base` runs.

    Args:
        base: its linears are `AdaptedExpertLinear`.
        format: the same as theirs.
        specs: of its linears.
    """

    def __init__(self, base: SwitchGLU, bank: AdapterBank, specs: Sequence[LinearSpec], format: IndexFormat) -> None:
        super().__init__()
        self.base = base
        self._bank = bank
        self._names = frozenset(spec.group for spec in specs)
        self._format = format

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Tokens [..., in] and the experts chosen for each, [..., k] → [..., k, out]."""
        context = self._bank.context
        if context is None or not context.changes(self._bank.groups[name] for name in self._names):
            return cast(mx.array, self.base(x, experts))
        tokens = context.token_adapters()
        if tokens is None:
            return self._run(x, experts, 1)
        numbers = tokens.numbers.reshape(*experts.shape[:-1], 1)
        return self._run(x, experts * tokens.count + numbers, tokens.count)

    def _run(self, x: mx.array, indices: mx.array, adapters: int) -> mx.array:
        with self._format.of(adapters):
            return cast(mx.array, self.base(x, indices))


class AdaptedExpertLinear(nn.Module):  # type: ignore[misc]
    """The linears of all experts at one path, which add the LoRA product of each token's adapter."""

    def __init__(self, base: nn.Module, bank: AdapterBank, spec: LinearSpec, format: IndexFormat) -> None:
        super().__init__()
        self.base = base
        self._bank = bank
        self._group = bank.groups[spec.group]
        self._format = format
        self.path = spec.path

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Inputs [..., 1, in], and indices in the layer's format, of one shape that [...] can be broadcast to →
        [..., 1, out]."""
        context, adapters = self._bank.context, self._format.adapters
        if context is None or adapters is None:
            return cast(mx.array, self.base(x, indices, sorted_indices=sorted_indices))
        experts, numbers = self._format.split(indices, adapters)
        y = self.base(x, experts, sorted_indices=sorted_indices)
        return context.adapt_experts(self._group, self.path, ExpertCall(x, experts, numbers, sorted_indices), y)


# -- installing them -----------------------------------------------------------------------------


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
        self._outputs: list[mx.array] = []
        self._left = 0  # how many linears have not taken their outputs of this input

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → the outputs of all linears, in order."""
        return cast(mx.array, self.linear(x))

    def of_one(self, x: mx.array, place: int) -> mx.array:
        """[..., in] → the outputs of one linear."""
        if self._x is not x:
            self._x, self._left = x, len(self._starts) + 1
            self._outputs = list(mx.split(self.linear(x), self._starts, axis=-1))
        output = self._outputs[place]
        self._left -= 1
        if not self._left:  # nothing of a pass is kept
            self._x, self._outputs = None, []
        return output


def _join(linears: Sequence[AdaptedLinear], group: LinearGroup) -> None:
    """Joins the linears of a group, if there are several and one product can be theirs."""
    if len(linears) < 2 or len({_kind_of_product(linear) for linear in linears}) > 1:
        return
    if type(linears[0]) is AdaptedLinear and type(linears[0].base) in _JOINABLE:
        joined = JoinedLinears([linear.base for linear in linears])
        group.join(joined)
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
