"""The paths that Transformers gives to linears which mlx-lm names otherwise.

mlx-lm's `sanitize` turns the names of a checkpoint into those of its model. So a name that other models have in
Transformers is this model's name too if `sanitize` makes the linear's own name of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_parallm.adapters.weights import LinearSpec

_NAMES = (
    {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
    {
        "mlp.gate_proj": "shared_mlp.input_linear",
        "mlp.up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
    },
)
"""Sets of ends of paths in mlx-lm, with those that linears of the same use have in Transformers. Two that have the same
there are one linear, with the outputs of the first before those of the second."""


def transformers_paths(model: nn.Module, linears: Mapping[str, LinearSpec]) -> dict[str, str]:
    """Transformers' paths of the linears that have another one there, by their own path."""
    found: dict[str, str] = {}
    for names in _NAMES:
        tried = {
            path: f"{path.removesuffix(end)}{names[end]}"
            for end in names
            for path, spec in linears.items()
            if not spec.experts and re.search(rf"(^|\.){re.escape(end)}$", path)
        }
        own = _sanitized(model, tried, linears) if tried else frozenset()
        found |= {path: name for path, name in tried.items() if f"{path}.weight" in own}
    return found


def _sanitized(model: nn.Module, tried: Mapping[str, str], linears: Mapping[str, LinearSpec]) -> frozenset[str]:
    """The names of the weights that `sanitize` makes of the model's own, of which those of some linears have other
    names. Nothing is computed."""
    weights = {name: each for name, each in tree_flatten(model.parameters()) if name.rpartition(".")[0] not in tried}
    outputs = dict.fromkeys(tried.values(), 0)
    for path, name in tried.items():
        outputs[name] += linears[path].out_features
        weights[f"{name}.weight"] = mx.zeros((outputs[name], linears[path].in_features))
    try:
        return frozenset(model.sanitize(weights))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # these are not a whole checkpoint's weights
        return frozenset()
