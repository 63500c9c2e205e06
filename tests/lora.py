"""Random adapters, and models with an adapter merged into their weights: the reference of every mixed batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import AdaptedExpertLinear, AdaptedExperts, AdaptedLinear

QV = ("q_proj", "v_proj")


def layout_of(model: nn.Module) -> AdapterLayout:
    """Of a model without adapted linears."""
    return adapter_layout(model)


def random_adapter(
    layout: AdapterLayout,
    seed: int,
    rank: int = 4,
    targets: Collection[str] = (),
    size: float = 0.5,
    scale: float = 2.0,
) -> AdapterWeights:
    """Random factors on the linears with these last names, by default on those of all layers; `size`: of a change to
    what W x is."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for spec in layout:
        if spec.target in targets if targets else spec is not layout.head:
            a = rng.normal(size=spec.a_shape(rank)) / np.sqrt(spec.in_features)
            b = rng.normal(size=spec.b_shape(rank)) * size / np.sqrt(rank) / scale
            pairs[spec.path] = LoRAPair(a.astype(np.float32), b.astype(np.float32), scale)
    return AdapterWeights(pairs)


def every_target(layout: AdapterLayout) -> set[str]:
    """The names of all linears that an adapter may change, the head among them."""
    return {spec.target for spec in layout}


def merged(model: nn.Module, weights: AdapterWeights) -> nn.Module:
    """The model, its linears' weights changed to W + scale · (a b)ᵀ, in place."""
    modules = dict(model.named_modules())
    for path, pair in weights.pairs.items():
        change = mx.array(pair.scale * (pair.a @ pair.b).swapaxes(-1, -2))
        if path in modules or path.endswith("kv_b_proj"):
            for at, part in changes(modules, path, change):
                modules[at].weight = modules[at].weight + part
        else:
            embedding = adapter_layout(model).head.embedding
            untied = UntiedEmbedding(modules[embedding], modules[embedding].weight + change)
            model.update_modules(tree_unflatten([(embedding, untied)]))
    return model


def changes(modules: Mapping[str, nn.Module], path: str, change: mx.array) -> list[tuple[str, mx.array]]:
    """A change [out, in] of the linear at a path, as one of each module's weight. mlx-lm keeps kv_b_proj, whose outputs
    are the keys and values of one head after the other, as two modules with one matrix per head."""
    if path in modules:
        return [(path, change)]
    keys, values = (path.replace("kv_b_proj", name) for name in ("embed_q", "unembed_out"))
    heads, latent, width = modules[keys].weight.shape
    by_head = change.reshape(heads, -1, latent)
    return [(keys, by_head[:, :width].swapaxes(1, 2)), (values, by_head[:, width:])]


def remove_adapters(model: nn.Module) -> nn.Module:
    """The model with its own linears again, in place."""
    for kind in (AdaptedLinear | AdaptedExpertLinear, AdaptedExperts):
        adapted = [(path, part.base) for path, part in model.named_modules() if isinstance(part, kind)]
        model.update_modules(tree_unflatten(adapted))
    return model


class UntiedEmbedding(nn.Module):
    """The embedding of a tied model, with another weight as the head."""

    def __init__(self, base: nn.Embedding, head: mx.array) -> None:
        super().__init__()
        self.base, self.head = base, head

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.base(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        return x @ self.head.T
