"""How many numbers of a layer's matrices multiply a token: what its forward costs."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear


def matrix_numbers(layer: nn.Module) -> int:
    """Of linears, quantized or not, and of the experts that a token is sent to."""
    return sum(map(_linear, layer.modules())) + sum(_experts(layer))


def _linear(part: nn.Module) -> int:
    if isinstance(part, nn.QuantizedLinear):
        return int(part.weight.size * 32 // part.bits)
    return int(part.weight.size) if isinstance(part, nn.Linear) else 0


def _experts(layer: nn.Module) -> list[int]:
    chosen = max((_chosen(part) for part in layer.modules()), default=0)
    return [
        int(part.input_dims * part.output_dims) * (min(chosen, part.num_experts) or part.num_experts)
        for part in layer.modules()
        if isinstance(part, SwitchLinear | QuantizedSwitchLinear)
    ]


def _chosen(part: Any) -> int:
    """Experts a token is sent to, by the names that mlx-lm's files have for it; 0: this module does not say."""
    return int(getattr(part, "top_k", 0) or getattr(part, "num_experts_per_tok", 0))
