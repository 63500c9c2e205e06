"""The choice between dense attention, attention by blocks, and the kernel."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlx_parallm.batch.attention import AttentionChoice
from mlx_parallm.batch.attention_times import AttentionTimes, Batch, measure_attention
from mlx_parallm.batch.paged_attention import PagedAttention
from mlx_parallm.model.layer_state import LayerSpec

BATCHES: list[Batch] = [(1, 500), (4, 500), (16, 500), (16, 4000)]


def times(dense: list[float], by_blocks: list[float], kernel: list[float], difference: float = 0.0) -> AttentionTimes:
    """Of the first batches."""
    columns = (dict(zip(BATCHES, column, strict=False)) for column in (dense, by_blocks, kernel))
    return AttentionTimes(*columns, difference, 1e-3)


@pytest.mark.parametrize(
    ("dense", "rows"),
    [([2.0, 1.0, 1.0], 0), ([0.5, 4.0, 1.0], 1), ([0.5, 1.0, 9.0], 4), ([0.5, 1.0, 1.0], 16)],
)
def test_dense_attention_is_used_up_to_the_first_number_of_rows_where_it_is_slower(
    dense: list[float], rows: int
) -> None:
    found = times([*dense, 0.1], [1.0, 2.0, 3.0, 9.0], [])
    choice = found.choice(kernel=False)
    assert choice == AttentionChoice(rows)
    assert f"dense up to {rows} rows, else by blocks" in found.text(choice)
    with_kernel = times([*dense, 0.1], [0.1] * 4, [1.0, 2.0, 3.0, 9.0])
    assert with_kernel.choice(kernel=True) == AttentionChoice(rows, kernel=True)


@pytest.mark.parametrize(
    ("kernel", "difference", "agrees", "is_faster"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1e-4, True, True),
        ([9.0, 9.0, 1.0, 1.0], 1e-4, True, True),
        ([1.0, 1.0, 1.0, 9.0], 1e-4, True, False),
        ([1.0, 1.0, 9.0, 1.0], 1e-4, True, False),
        ([1.0, 1.0, 1.0, 1.0], 1e-2, False, True),
        ([1.0, 1.0, 1.0, 1.0], math.nan, False, True),
        ([], 0.0, False, False),
    ],
)
def test_the_kernel_must_agree_and_be_faster_for_short_and_long_sequences(
    kernel: list[float], difference: float, agrees: bool, is_faster: bool
) -> None:
    found = times([9.0] * 4, [2.0] * 4, kernel, difference)
    assert (found.agrees, found.is_faster) == (agrees, is_faster)


def test_outputs_that_are_no_numbers_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedAttention, "attend", lambda self, keys, values, queries, *_: queries * math.nan)
    found = measure_attention(LayerSpec(2, 32, 32), mx.float32, kernel=True)
    assert found.kernel
    assert not found.agrees


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU has it")
def test_rows_attend_one_by_one_where_there_is_no_gather_mm() -> None:
    found = measure_attention(LayerSpec(2, 16, 16), mx.bfloat16, kernel=False)
    assert found.choice(kernel=False) == AttentionChoice(math.inf)
