"""A CPU's own modules compute what they replace."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import FAMILIES, tiny_model

from mlx_parallm.model.device import CPUGatedMLP, CPULinear, CPURoPE, adapt_to_cpu
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


@pytest.mark.parametrize(("dims", "base", "scale"), [(16, 10000.0, 1.0), (8, 500.0, 0.25)])
def test_rope_of_single_tokens_at_their_own_offsets(dims: int, base: float, scale: float) -> None:
    """Partial rotation is left to MLX: what lies past `dims` passes through."""
    original, model = nn.RoPE(dims, base=base, scale=scale), nn.Sequential(nn.RoPE(dims, base=base, scale=scale))
    adapt_to_cpu(model)
    rope = model.layers[0]
    assert isinstance(rope, CPURoPE)
    x = mx.random.normal((5, 3, 1, 16))
    for offset in (mx.array([0, 1, 7, 300, 4000]), mx.array([9, 8, 7, 6, 5])):
        assert mx.allclose(rope(x, offset), original(x, offset), atol=2e-6)
    assert mx.array_equal(rope(x, 3), original(x, 3)), "one offset for all is left to MLX"
    row = mx.random.normal((1, 3, 6, 16))
    assert mx.array_equal(rope(row, mx.array([4])), original(row, mx.array([4])))
