"""Random adapters, and models with an adapter merged into their weights: the reference of every mixed batch."""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair
from mlx_parallm.model.hooks import adapter_layout

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
    """Random factors on the linears with these last names, all by default; `size`: of a change to what W x is."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for path, spec in layout.linears.items():
        if not targets or spec.target in targets:
            a = rng.normal(size=(spec.in_features, rank)) / np.sqrt(spec.in_features)
            b = rng.normal(size=(rank, spec.out_features)) * size / np.sqrt(rank) / scale
            pairs[path] = LoRAPair(a.astype(np.float32), b.astype(np.float32), scale)
    return AdapterWeights(pairs)


def merged(model: nn.Module, weights: AdapterWeights) -> nn.Module:
    """The model, its linears' weights changed to W + scale · (a b)ᵀ, in place."""
    modules = dict(model.named_modules())
    for path, pair in weights.pairs.items():
        change = mx.array(pair.scale * (pair.a @ pair.b).T)
        modules[path].weight = modules[path].weight + change
    return model
