"""Attention by pairs of row and block, against MLX's own over dense keys and values."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from mlx_parallm.batch.attention import DenseSpan
from mlx_parallm.batch.block_attention import BlockPairs
from mlx_parallm.batch.folds import RowBlocks
from mlx_parallm.batch.kv.arena import BLOCK_TOKENS, Arena
from mlx_parallm.model.families import LayerSpec

SPEC = LayerSpec(kv_heads=2, head_dim_k=16, head_dim_v=8)


def arena(blocks: int) -> Arena:
    made = Arena([SPEC], mx.float32)
    made.resize(blocks)
    made.keys[0], made.values[0] = mx.random.normal((2, blocks, 64, 16)), mx.random.normal((2, blocks, 64, 8))
    return made


def rows_of(lengths: list[int], blocks: int, window: int | None) -> list[RowBlocks]:
    """Rows whose blocks lie anywhere; a window leaves out the blocks below it."""
    places = random.Random(0).sample(range(blocks), blocks)
    rows = []
    for length in lengths:
        first = 0 if window is None else max(0, length - window) // BLOCK_TOKENS
        count = -(-length // BLOCK_TOKENS) - first
        rows.append(RowBlocks([places.pop() for _ in range(count)], first * BLOCK_TOKENS, length - 1))
    return rows


def expected(made: Arena, row: RowBlocks, query: mx.array, window: int | None, sinks: mx.array | None) -> mx.array:
    at = mx.array(list(row.places))
    keys, values = (a[0][:, at].flatten(1, 2)[None] for a in (made.keys, made.values))
    position = mx.arange(row.first, row.first + keys.shape[2])
    seen = position <= row.start
    if window is not None:
        seen = seen & (position > row.start - window)
    return mx.fast.scaled_dot_product_attention(query[None], keys, values, scale=0.3, mask=seen[None], sinks=sinks)[0]


@pytest.mark.parametrize("lengths", [[1], [64], [65], [300], [200, 200], [1, 64, 65, 500, 130], [64] * 5])
@pytest.mark.parametrize("window", [None, 40, 64, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_pairs_equal_dense_attention(lengths: list[int], window: int | None, with_sinks: bool) -> None:
    made, rows = arena(32), rows_of(lengths, 32, window)
    queries = 3 * mx.random.normal((len(rows), 6, 1, 16))
    sinks = mx.random.normal((6,)) if with_sinks else None
    got = BlockPairs(rows, window).attend(made, 0, queries, 0.3, sinks)
    want = mx.stack([expected(made, row, q, window, sinks) for row, q in zip(rows, queries, strict=True)])
    assert got.shape == (len(rows), 6, 1, 8)
    assert mx.allclose(got, want, atol=1e-5)


def test_rows_may_share_blocks() -> None:
    made = arena(8)
    rows = [RowBlocks([5, 2, 7], 0, 150), RowBlocks([5, 2, 1], 0, 190)]
    queries = mx.random.normal((2, 2, 1, 16))
    got = BlockPairs(rows, None).attend(made, 0, queries, 0.3)
    want = mx.stack([expected(made, row, q, None, None) for row, q in zip(rows, queries, strict=True)])
    assert mx.allclose(got, want, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    made = arena(3)
    queries = mx.full((1, 2, 1, 16), 1e4)
    got = BlockPairs([RowBlocks([0, 2], 0, 100)], None).attend(made, 0, queries, 1.0)
    assert mx.isfinite(got).all()


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 7), (63, 2), (70, 64), (150, 30)])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("consecutive", [True, False])
def test_a_chunk_sees_what_single_tokens_see(start: int, tokens: int, window: int | None, consecutive: bool) -> None:
    made, table = arena(8), [2, 3, 4, 5] if consecutive else [6, 1, 4, 3]
    queries = mx.random.normal((tokens, 4, 1, 16))

    def seen(start: int, tokens: int) -> RowBlocks:
        first = 0 if window is None else max(0, start - window + 1) // BLOCK_TOKENS
        return RowBlocks(table[first : -(-(start + tokens) // BLOCK_TOKENS)], first * BLOCK_TOKENS, start, tokens)

    got = DenseSpan(seen(start, tokens), window).attend(made, 0, queries, 0.3)
    singles = [seen(at, 1) for at in range(start, start + tokens)]
    assert mx.allclose(got, BlockPairs(singles, window).attend(made, 0, queries, 0.3), atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_rows_with_several_tokens_share_a_call(window: int | None) -> None:
    made = arena(8)
    rows = [RowBlocks([6, 1, 4], 0, 150, 20), RowBlocks([3], 0, 0, 5), RowBlocks([2, 7], 0, 70, 1)]
    queries = mx.random.normal((26, 4, 1, 16))
    got = BlockPairs(rows, window).attend(made, 0, queries, 0.3)
    singles = [RowBlocks(row.places, row.first, at) for row in rows for at in range(row.start, row.stop)]
    assert mx.allclose(got, BlockPairs(singles, window).attend(made, 0, queries, 0.3), atol=1e-5)
