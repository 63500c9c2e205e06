"""Attention on a CPU against MLX's own."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_parallm.batch.attention import additive, attention


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("tokens", "span"), [(1, 1), (1, 40), (7, 7), (7, 40)])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_mlx(group: int, tokens: int, span: int, masked: bool) -> None:
    """One token of many rows with a mask per row, or many tokens of one row with a causal mask."""
    rows = 5 if tokens == 1 else 1
    keys, values = mx.random.normal((rows, 2, span, 16)), mx.random.normal((rows, 2, span, 8))
    queries = 3 * mx.random.normal((rows, 2 * group, tokens, 16))
    seen = None
    if masked and tokens == 1:
        seen = (mx.arange(span)[None] < mx.array([1, span, max(1, span // 2), span, 1])[:, None])[:, None, None]
    elif masked:
        seen = mx.arange(span)[None] <= mx.arange(span - tokens, span)[:, None]
    mask = None if seen is None else additive(seen, mx.float32)
    got = attention(queries, keys, values, 0.25, mask, None)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=seen)
    assert got.shape == (rows, 2 * group, tokens, 8)
    assert mx.allclose(got, expected, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    queries, keys = mx.full((1, 1, 1, 4), 1e3), mx.full((1, 1, 2, 4), 1e3)
    got = attention(queries, keys, mx.array([[[[1.0], [3.0]]]]), 1.0, None, None)
    assert got.item() == pytest.approx(2.0)
