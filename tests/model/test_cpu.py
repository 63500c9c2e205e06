"""A CPU's own modules compute what they replace."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import FAMILIES, tiny_model

from mlx_parallm.model.device import CPUGatedMLP, CPULinear, adapt_to_cpu
from mlx_parallm.model.families import relative_error


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapted_model_gives_the_same_logits_from_the_same_arrays(family: str) -> None:
    model = tiny_model(family)
    tokens = mx.array([[5, 9, 200, 31, 77]])
    before, arrays = model(tokens), {id(array) for _, array in tree_flatten(model.parameters())}
    adapt_to_cpu(model)
    assert any(isinstance(module, CPULinear) for module in model.modules())
    assert {id(array) for _, array in tree_flatten(model.parameters())} == arrays
    assert relative_error(model(tokens), before) < 1e-5


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(24, 10, bias=bias))
    x = mx.random.normal((3, 2, 24))
    expected = model(x)
    adapt_to_cpu(model)
    assert isinstance(model.layers[0], CPULinear)
    assert mx.allclose(model(x), expected, atol=1e-5)


def test_gated_mlp_at_extreme_gates() -> None:
    """Where the sigmoid's exponential overflows the product is zero, as silu's is."""
    model = tiny_model("llama")
    mlp = model.layers[0].mlp
    x = 200 * mx.random.normal((2, 3, 64))
    expected = mlp(x)
    adapt_to_cpu(model)
    assert isinstance(model.layers[0].mlp, CPUGatedMLP)
    assert mx.isfinite(expected).all()
    apart = mx.abs(model.layers[0].mlp(x) - expected).max()
    assert apart <= 1e-6 * mx.abs(expected).max(), "the rounding of a sum is relative to its terms"
