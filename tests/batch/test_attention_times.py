"""The choice between dense attention and attention by blocks."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlx_parallm.batch.attention import AttentionTimes, measure_attention
from mlx_parallm.model.layer_state import LayerSpec


@pytest.mark.parametrize(
    ("dense", "rows"),
    [([2.0, 1.0, 1.0], 0), ([0.5, 4.0, 1.0], 1), ([0.5, 1.0, 9.0], 4), ([0.5, 1.0, 1.0], 8)],
)
def test_dense_attention_is_used_up_to_the_first_number_of_rows_where_it_is_slower(
    dense: list[float], rows: int
) -> None:
    times = AttentionTimes(dict(zip((1, 4, 8), dense, strict=True)), {1: 1.0, 4: 2.0, 8: 3.0})
    assert times.dense_rows == rows
    assert f"up to {rows} rows" in times.text


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU has it")
def test_rows_attend_one_by_one_where_there_is_no_gather_mm() -> None:
    assert measure_attention(LayerSpec(2, 16, 16), mx.bfloat16).dense_rows == math.inf
