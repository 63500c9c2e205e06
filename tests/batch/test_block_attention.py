"""Attention by blocks, against MLX's own over dense keys and values."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlx_parallm.batch.attention import DenseSpan
from mlx_parallm.batch.block_attention import BlockAttention, folds_of
from mlx_parallm.batch.spans import SeenBlocks
from mlx_parallm.kv.arena import BLOCK_TOKENS, Arena
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.layer_state import LayerSpec

SPEC = LayerSpec(kv_heads=2, head_dim_k=16, head_dim_v=8)


def arena(blocks: int) -> Arena:
    made = Arena([SPEC], mx.float32)
    made.resize(blocks)
    made.keys[0], made.values[0] = mx.random.normal((2, blocks, 64, 16)), mx.random.normal((2, blocks, 64, 8))
    return made


def rows_of(lengths: list[int], blocks: int, window: int | None) -> list[SeenBlocks]:
    """Rows whose blocks lie anywhere; a window leaves out the blocks below it."""
    places = random.Random(0).sample(range(blocks), blocks)
    rows = []
    for length in lengths:
        first = 0 if window is None else max(0, length - window) // BLOCK_TOKENS
        count = -(-length // BLOCK_TOKENS) - first
        rows.append(SeenBlocks([places.pop() for _ in range(count)], first * BLOCK_TOKENS, length - 1))
    return rows


def expected(made: Arena, row: SeenBlocks, query: mx.array, window: int | None, sinks: mx.array | None) -> mx.array:
    at = mx.array(list(row.block_ids))
    keys, values = (a[0][:, at].flatten(1, 2)[None] for a in (made.keys, made.values))
    position = mx.arange(row.first, row.first + keys.shape[2])
    seen = position <= row.start
    if window is not None:
        seen = seen & (position > row.start - window)
    return mx.fast.scaled_dot_product_attention(query[None], keys, values, scale=0.3, mask=seen[None], sinks=sinks)[0]


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas for a CPU, and those for a GPU."""
    prepare_device()
    monkeypatch.setattr("mlx_parallm.batch.block_attention.on_cpu", lambda: request.param)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("lengths", [[1], [64], [65], [300], [200, 200], [1, 64, 65, 500, 130], [64] * 5])
@pytest.mark.parametrize("window", [None, 40, 64, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_it_equals_dense_attention(lengths: list[int], window: int | None, with_sinks: bool) -> None:
    made, rows = arena(32), rows_of(lengths, 32, window)
    queries = 3 * mx.random.normal((len(rows), 6, 1, 16))
    sinks = mx.random.normal((6,)) if with_sinks else None
    got = BlockAttention(rows, window).attend(made.keys[0], made.values[0], queries, 0.3, sinks)
    want = mx.stack([expected(made, row, q, window, sinks) for row, q in zip(rows, queries, strict=True)])
    assert got.shape == (len(rows), 6, 1, 8)
    assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.usefixtures("_either_way")
def test_a_shared_block_may_leave_the_windows_of_all_that_share_it() -> None:
    """Then nothing is seen in its rectangle, and a softmax over nothing is NaN if it is not guarded."""
    made = arena(40)
    rows = [SeenBlocks([0, number + 1], 0, 126) for number in range(33)]
    assert len(folds_of(rows)) == 2
    queries = mx.random.normal((33, 2, 1, 16))
    blocks = BlockAttention(rows, 64)
    for start in (126, 127):  # the first of them still sees the last position of block 0
        got = blocks.attend(made.keys[0], made.values[0], queries, 0.3)
        now = [SeenBlocks(row.block_ids, 0, start) for row in rows]
        want = mx.stack([expected(made, row, q, 64, None) for row, q in zip(now, queries, strict=True)])
        assert mx.allclose(got, want, atol=1e-5)
        blocks.advance()


def test_large_scores_do_not_overflow() -> None:
    made = arena(3)
    queries = mx.full((1, 2, 1, 16), 1e4)
    got = BlockAttention([SeenBlocks([0, 2], 0, 100)], None).attend(made.keys[0], made.values[0], queries, 1.0)
    assert mx.isfinite(got).all()


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 7), (63, 2), (70, 64), (150, 30)])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("consecutive", [True, False])
def test_a_chunk_sees_what_single_tokens_see(start: int, tokens: int, window: int | None, consecutive: bool) -> None:
    made, table = arena(8), [2, 3, 4, 5] if consecutive else [6, 1, 4, 3]
    queries = mx.random.normal((tokens, 4, 1, 16))

    def seen(start: int, tokens: int) -> SeenBlocks:
        first = 0 if window is None else max(0, start - window + 1) // BLOCK_TOKENS
        return SeenBlocks(table[first : -(-(start + tokens) // BLOCK_TOKENS)], first * BLOCK_TOKENS, start, tokens)

    got = DenseSpan(seen(start, tokens), window).attend(made.keys[0], made.values[0], queries, 0.3)
    singles = [seen(at, 1) for at in range(start, start + tokens)]
    assert mx.allclose(
        got, BlockAttention(singles, window).attend(made.keys[0], made.values[0], queries, 0.3), atol=1e-5
    )


@pytest.mark.parametrize("window", [None, 50])
def test_rows_with_several_tokens_share_a_call(window: int | None) -> None:
    made = arena(8)
    rows = [SeenBlocks([6, 1, 4], 0, 150, 20), SeenBlocks([3], 0, 0, 5), SeenBlocks([2, 7], 0, 70, 1)]
    queries = mx.random.normal((26, 4, 1, 16))
    got = BlockAttention(rows, window).attend(made.keys[0], made.values[0], queries, 0.3)
    singles = [SeenBlocks(row.block_ids, row.first, at) for row in rows for at in range(row.start, row.stop)]
    assert mx.allclose(
        got, BlockAttention(singles, window).attend(made.keys[0], made.values[0], queries, 0.3), atol=1e-5
    )


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 500])
def test_two_groups_of_rows_and_a_prompt_that_both_share(window: int | None, with_sinks: bool) -> None:
    made = arena(64)
    tables = [[*range(10), *range(10 + 12 * (row % 2), 22 + 12 * (row % 2)), 40 + row] for row in range(8)]
    rows = [SeenBlocks(table, 0, 64 * 22 + row) for row, table in enumerate(tables)]
    assert [[(len(fold.tokens), len(fold.block_ids)) for fold in folds] for folds in folds_of(rows)] == [
        [(1, 1)] * 8,
        [(8, 10)],
        [(4, 12)] * 2,
    ]
    queries = mx.random.normal((8, 4, 1, 16))
    sinks = mx.random.normal((4,)) if with_sinks else None
    want = mx.stack([expected(made, row, q, window, sinks) for row, q in zip(rows, queries, strict=True)])
    got = BlockAttention(rows, window).attend(made.keys[0], made.values[0], queries, 0.3, sinks)
    assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.usefixtures("_either_way")
def test_a_row_with_nan_changes_no_other_row() -> None:
    made = arena(48)
    rows = [SeenBlocks([0, 1, 2], 0, 130), SeenBlocks([3], 0, 20), SeenBlocks([4, 5], 0, 100)]
    shared = [SeenBlocks([*range(8, 16), 16 + row], 0, 64 * 8 + row) for row in range(6)]
    queries = mx.random.normal((9, 4, 1, 16))
    before = BlockAttention([*rows, *shared], None).attend(made.keys[0], made.values[0], queries, 0.3)
    made.keys[0][:, mx.array([0, 2, 16])] = mx.nan
    made.values[0][:, mx.array([0, 2, 16])] = mx.nan
    queries[4] = mx.nan
    after = BlockAttention([*rows, *shared], None).attend(made.keys[0], made.values[0], queries, 0.3)
    others = mx.array([1, 2, 5, 6, 7, 8])
    assert mx.array_equal(after[others], before[others])
    assert mx.isnan(after[mx.array([0, 3, 4])]).all()
