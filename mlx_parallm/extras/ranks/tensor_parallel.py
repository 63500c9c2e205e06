"""Splits a base model among the ranks of a group (tensor parallelism, arXiv 1909.08053), through mlx-lm's `shard`.

    q, k, v, gate, up    split by output: each rank has some of the heads and some of the hidden features
    o, down              split by input: the sum over the ranks is the whole output
    all others           whole on every rank

A rank's part of the first gives it only a part of the gradient of their input. The norm before them adds these parts
in the backward pass, once for all linears with that input and for their adapters.

Heads are divided among the ranks with their keys and values. If their number cannot be divided, heads of zeros are
added. They change nothing, because the columns of the output projection that read them are zeros too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import QuantizedAllToShardedLinear, QuantizedShardedToAllLinear, sum_gradients
from mlx.utils import tree_unflatten

from mlx_parallm.adapters.bank import LinearSplit, ModelSplit, SplitBy
from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.linears import AdaptedLinear

SPLIT_FAMILIES = ("llama", "qwen2", "qwen3")
"""mlx-lm model files for which the tests compare several ranks with one. mistral uses mlx-lm's `llama`."""

_MOST_RANKS = 16
"""Numbers of ranks up to this one are named in the error for a number that does not work."""

_BY = {
    nn.AllToShardedLinear: SplitBy.OUTPUT,
    QuantizedAllToShardedLinear: SplitBy.OUTPUT,
    nn.ShardedToAllLinear: SplitBy.INPUT,
    QuantizedShardedToAllLinear: SplitBy.INPUT,
}


class AdaptedSummedLinear(AdaptedLinear):
    """A linear that is split by input among ranks. Each adds its part of the LoRA product before the ranks' outputs are
    added."""

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, in / ranks] → [B, T, out]."""
        return cast(mx.array, self.base.total(self.adapted(x, self.base.part)))


class SummedLinear(nn.Module):  # type: ignore[misc]
    """A linear that is split by input: the outputs of the ranks are added. `part`: this rank's part, without a bias.
    `adapted_kind`: the class that takes its place when adapters are installed."""

    adapted_kind = AdaptedSummedLinear

    def __init__(self, part: nn.Module, bias: mx.array | None, group: mx.distributed.Group) -> None:
        super().__init__()
        self.part = part
        self._group = group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        """This rank's inputs [..., in / ranks] → whole outputs [..., out]."""
        return self.total(self.part(x))

    def total(self, y: mx.array) -> mx.array:
        """The sum of the ranks' outputs, with the bias."""
        y = mx.distributed.all_sum(y, group=self._group)
        return y + self.bias if "bias" in self else y


class NormBeforeParts(nn.Module):  # type: ignore[misc]
    """A norm whose output the linears that are split by output read. In the backward pass, the gradients that the ranks
    have of this output are added."""

    def __init__(self, norm: nn.Module, group: mx.distributed.Group) -> None:
        super().__init__()
        self.norm = norm
        self._summed = sum_gradients(group)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., hidden] → [..., hidden]."""
        return cast(mx.array, self._summed(self.norm(x)))


def split_model(model: nn.Module, group: mx.distributed.Group) -> ModelSplit:
    """Keeps this rank's part of a model with lazy weights, and returns how its linears are divided.

    Raises:
        UnsupportedModelError: its architecture cannot be split, or not into so many parts.
    """
    check_ranks(model, group.size())
    for attention in _attentions(model):
        _pad_heads(attention, -(-attention.n_kv_heads // group.size()) * group.size())
    widths = {path: module.weight.shape for path, module in model.named_modules() if "weight" in module}
    inputs = {path: _inputs(module) for path, module in model.named_modules() if "weight" in module}
    model.shard(group)
    splits: dict[str, LinearSplit] = {}
    for path, module in model.named_modules():
        if (by := _BY.get(type(module))) is not None:
            splits[path] = LinearSplit(by, widths[path][0] if by is SplitBy.OUTPUT else inputs[path])
    modules = dict(model.named_modules())
    parts = [(path, _part(modules[path], split.by, group)) for path, split in splits.items()]
    model.update_modules(tree_unflatten(parts))
    for layer in model.layers:
        layer.input_layernorm = NormBeforeParts(layer.input_layernorm, group)
        layer.post_attention_layernorm = NormBeforeParts(layer.post_attention_layernorm, group)
    return ModelSplit(group, splits)


def check_ranks(model: nn.Module, ranks: int) -> None:
    """Raises UnsupportedModelError: the model cannot be split into so many parts."""
    name = type(model).__module__.rpartition(".")[2]
    if name not in SPLIT_FAMILIES:
        raise UnsupportedModelError(
            f"a model of the architecture {name} cannot be split over several machines; these can: "
            f"{', '.join(SPLIT_FAMILIES)}. Start the server without mlx.launch"
        )
    if why := _obstacle(model, ranks):
        works = [str(count) for count in range(2, _MOST_RANKS + 1) if not _obstacle(model, count)]
        numbers = f"these numbers of ranks work: {', '.join(works)}" if works else "no number of ranks works"
        raise UnsupportedModelError(f"this model cannot be split into {ranks} parts: {why}; {numbers}")


def _obstacle(model: nn.Module, ranks: int) -> str:
    """Why the model cannot be split into so many parts; "" if it can."""
    for layer in model.layers:
        attention, down = layer.self_attn, layer.mlp.down_proj
        if ranks > attention.n_heads:
            return f"it has {attention.n_heads} query heads"
        hidden = _inputs(down)
        if hidden % (ranks * _step(down)):
            return f"the {hidden} hidden features of its MLP are no multiple of {ranks * _step(down)}"
        size = _inputs(attention.o_proj) // attention.n_heads
        heads = -(-attention.n_kv_heads // ranks) * (attention.n_heads // attention.n_kv_heads)
        padded = attention.n_kv_heads % ranks
        if (size if padded else heads * size) % _step(attention.o_proj):
            return f"its heads of {size} features do not end where a group of quantized weights ends"
    return ""


def _attentions(model: nn.Module) -> Iterator[nn.Module]:
    return (layer.self_attn for layer in model.layers)


def _inputs(linear: nn.Module) -> int:
    """The number of inputs of a linear."""
    width = int(linear.weight.shape[-1])
    return width * 32 // int(linear.bits) if hasattr(linear, "bits") else width


def _step(linear: nn.Module) -> int:
    """The inputs of a part must be a multiple of this: quantized weights share a scale in groups."""
    return int(getattr(linear, "group_size", 1))


def _pad_heads(attention: nn.Module, kv_heads: int) -> None:
    """Adds heads of zeros up to this number of heads of keys and values, and as many query heads for each as before."""
    before = attention.n_kv_heads
    if kv_heads == before:
        return
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
        linear.update({name: _padded(array, 0, kv_heads, before) for name, array in linear.parameters().items()})
    output = attention.o_proj
    columns = {name: array for name, array in output.parameters().items() if name != "bias"}
    output.update({name: _padded(array, -1, kv_heads, before) for name, array in columns.items()})
    attention.n_heads = attention.n_heads // before * kv_heads
    attention.n_kv_heads = kv_heads


def _padded(array: mx.array, axis: int, heads: int, before: int) -> mx.array:
    """An array of `before` parts along an axis, with zeros for the parts up to `heads`."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, array.shape[axis] // before * (heads - before))
    return mx.pad(array, widths)


def _part(linear: nn.Module, by: SplitBy, group: mx.distributed.Group) -> nn.Module:
    """The linear of this project in the place of mlx-lm's. Those add outputs and gradients before an adapter could add
    to them."""
    if isinstance(linear, QuantizedAllToShardedLinear | QuantizedShardedToAllLinear):
        part = nn.QuantizedLinear(
            linear.group_size, 1, bias=False, group_size=linear.group_size, bits=linear.bits, mode=linear.mode
        )
        part.scales = linear.scales
        if "biases" in linear:
            part.biases = linear.biases
    else:
        part = nn.Linear(1, 1, bias=False)
    part.weight = linear.weight
    bias = linear.bias if "bias" in linear else None
    if by is SplitBy.INPUT:
        return SummedLinear(part, bias, group)
    if bias is not None:
        part.bias = bias
    return part
