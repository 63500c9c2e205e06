"""The KV pool: rows share prefixes and keep their own content."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from pool_walk import PoolWalk, install
from pools import MODELS, TEXT, WITH_STATES, cached, computed, found, pool

from mlx_parallm.kv.arena import Arena, lines_of
from mlx_parallm.kv.blocks import FREED
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.layer_state import KVLayout, LayerSpec

# ---- the cache of prefixes -----------------------------------------------------------------------


def test_rows_with_equal_tokens_read_the_same_blocks(tags) -> None:
    cache = pool(100)
    first, second = cache.open(200), cache.open(200)
    assert first is not None
    assert second is not None
    for row in (first, second):
        row.computed = 200
        cache.freeze(row, "v1", TEXT)
    assert first.tables[0][:3] == second.tables[0][:3]
    assert first.tables[0][3] != second.tables[0][3], "the block that is being filled is a row's own"
    assert cache.tokens_used == 3 * 64 + 2 * 8
    cache.check_integrity()


def test_a_row_that_goes_on_after_a_reset_registers_all_of_its_blocks(tags) -> None:
    cache = pool(100)
    row = computed(cache, TEXT[:192])
    cache.index.reset()
    assert cache.extend(row, 256)
    row.computed = 256
    cache.freeze(row, "v1", TEXT)
    assert found(cache, TEXT[:257]) == 256


def test_a_row_that_is_truncated_within_a_frozen_block_writes_to_its_own(tags) -> None:
    cache = pool(100)
    row, reader = computed(cache, TEXT[:192]), computed(cache, TEXT[:192])
    before = list(row.tables[0])
    cache.truncate(row, 100)
    assert row.tables[0] == before[:2]
    assert cache.extend(row, 101)
    assert row.tables[0][0] == before[0]
    assert row.tables[0][1] != before[1]
    cache.close(reader)
    assert found(cache, TEXT[:193]) == 192
    cache.check_integrity()


def test_a_row_that_is_closed_within_a_frozen_block_leaves_no_tail(tags) -> None:
    cache = pool(100)
    row = computed(cache, TEXT[:192])
    cache.truncate(row, 100)
    cache.close(row, "v1", TEXT[:100])
    cache.check_integrity()
    assert found(cache, TEXT[:193]) == 192


# ---- forks -----------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_last(tags) -> None:
    cache = pool(100)
    source = computed(cache, TEXT[:200], root=None)
    source.adapter_slot = 3
    fork = cache.fork(source, 150, 260)
    assert fork is not None
    assert (fork.computed, fork.adapter_slot) == (150, 3)
    assert fork.tables[0][:2] == source.tables[0][:2]
    assert not set(fork.tables[0][2:]) & set(source.tables[0])
    assert len(fork.tables[0]) == 5
    cache.check_integrity()


# ---- windows ---------------------------------------------------------------------------------------


def test_a_window_gives_back_what_no_token_attends_to(tags) -> None:
    cache = pool(100, MODELS["mixed"])
    row = computed(cache, TEXT[:640], root=None)
    cache.release_windows(row)
    full, windowed = row.tables
    assert FREED not in full
    assert windowed[:8] == [FREED] * 8  # token 640 attends to positions from 541 on
    assert FREED not in windowed[8:]
    assert cache.groups[1].allocator.used == 2
    cache.check_integrity()


def test_blocks_below_a_window_stay_cached_until_their_memory_is_needed(tags) -> None:
    cache = pool(100, MODELS["mixed"])
    row = computed(cache, TEXT[:640])
    cache.release_windows(row)
    assert found(cache, [*TEXT[:320], *range(300, 340)]) == 320
    assert cache.evict(cache.groups[1], 4) == 4
    assert found(cache, [*TEXT[:256], *range(300, 340)]) < 256
    assert found(cache, [*TEXT[:640], *range(300, 340)]) == 640
    cache.check_integrity()


def test_a_row_cannot_go_back_to_where_its_window_is_gone(tags) -> None:
    cache = pool(100, MODELS["mixed"])
    row = computed(cache, TEXT[:640], root=None)
    cache.release_windows(row)
    assert cache.holds(row, 630)
    assert not cache.holds(row, 600)
    for call in (lambda: cache.truncate(row, 600), lambda: cache.fork(row, 600, 700)):
        with pytest.raises(ValueError, match="window"):
            call()
    cache.truncate(row, 0)
    assert cache.extend(row, 100)
    cache.check_integrity()


def test_what_is_found_is_counted_for_rows_that_open_and_ask_for_it(tags) -> None:
    cache = pool(30)
    cached(cache, TEXT[:640])
    assert (cache.queries, cache.hits) == (640, 0)
    assert cache.cached("v1", TEXT[:700]) == 640
    row = cache.open(700, "v1", TEXT[:700])
    assert row is not None
    assert (cache.queries, cache.hits) == (1340, 640)
    assert cache.open(700, "v1", TEXT[:700], counts=False) is not None
    assert cache.open(2000, "v1", TEXT[:2000]) is None, "there is no room for it"
    assert cache.open(64) is not None
    assert (cache.queries, cache.hits) == (1340, 640)
    without = pool(40, keep_prefixes=False)
    cached(without, TEXT[:640])
    assert without.cached("v1", TEXT[:700]) == 0
    assert found(without, TEXT[:700]) == 0
    assert (without.queries, without.hits) == (0, 0)


def test_a_fork_is_no_longer_than_the_limit(tags) -> None:
    cache = pool(100, max_length=640)
    row = computed(cache, TEXT[:100])
    with pytest.raises(ValueError, match="640"):
        cache.fork(row, 100, 641)
    assert cache.fork(row, 100, 640) is not None
    cache.check_integrity()


# ---- real arrays -----------------------------------------------------------------------------------

SPECS = (LayerSpec(2, 4, 3), LayerSpec(1, 2, 2, window=100), LayerSpec(2, 4, 3))


def write(cache: LoRABatchedKVCache, row: KVRow, block: int, value: float) -> None:
    for group, table in zip(cache.groups, row.tables, strict=False):
        shapes = [(SPECS[i].kv_heads, 64, SPECS[i].head_dim_k, SPECS[i].head_dim_v) for i in group.layers]
        pairs = [(np.full((h, t, k), value), np.full((h, t, v), -value)) for h, t, k, v in shapes]
        group.arena.write_block(table[block], [x.astype(np.float32).view(np.uint8) for pair in pairs for x in pair])


def content(cache: LoRABatchedKVCache, row: KVRow) -> list[set[float]]:
    """Every distinct number in each of a row's blocks, sign aside."""
    return [
        {
            number
            for group, table in zip(cache.groups, row.tables, strict=False)
            for array in group.arena.read(table[block])
            for number in np.abs(array.view(np.float32)).flatten().tolist()
        }
        for block in range(len(row.tables[0]))
    ]


def test_growing_forking_and_moving_keep_the_numbers_of_real_arrays() -> None:
    layout = KVLayout(SPECS, mx.float32)
    cache = LoRABatchedKVCache(layout, DeviceMemory(layout.bytes_per_token * 64 * 100), 4096)
    rows = [cache.open(192) for _ in range(20)]
    for number, row in enumerate(rows):
        for block in range(3):
            write(cache, row, block, 10.0 * number + block + 1)
        row.computed = 192
    fork = cache.fork(rows[-1], 150, 192)
    for row in rows[:-1]:
        cache.close(row)
    while cache.tidy(2000, quiet=True):
        pass
    assert cache.bytes_held <= 5 * 64 * layout.bytes_per_token
    assert content(cache, rows[-1]) == content(cache, fork) == [{191.0}, {192.0}, {193.0}]
    write(cache, fork, 2, 5.0)
    assert content(cache, rows[-1])[2] == {193.0}
    assert cache.longest_row == 4096
    cache.check_integrity()


def test_the_bytes_of_an_arena_are_those_of_its_arrays_while_it_grows() -> None:
    arena = Arena([LayerSpec(1, 2, 2), LayerSpec(1, 2, 2)], mx.float32)
    arena.resize(2)
    assert arena.array_bytes == 2 * arena.block_bytes
    assert not arena.resize(4, most_bytes=1), "one layer has grown"
    assert (arena.blocks, arena.array_bytes) == (2, 3 * arena.block_bytes)
    without_layers = Arena([], mx.float32)
    without_layers.resize(3)
    assert without_layers.array_bytes == 3 * without_layers.block_bytes > 0


def test_tokens_that_wait_are_written_before_their_block_goes() -> None:
    """MLX would write them beyond the end of an array that has fewer blocks by then."""
    arena = Arena([LayerSpec(1, 2, 2)], mx.float32)
    arena.resize(3)
    for block_id in (0, 2):
        arena.write_later(
            0, lines_of(np.array([block_id]), np.array([7]), 1), mx.ones((1, 1, 1, 2)), mx.ones((1, 1, 1, 2))
        )
    arena.resize(1)
    assert not arena.pending_arrays()
    assert [int(array.sum()) for array in arena.arrays()] == [2, 2]


def test_an_arena_that_fails_to_grow_gives_back_the_layers_that_have_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout((LayerSpec(1, 2, 2), LayerSpec(1, 2, 2)), mx.float32)
    cache = LoRABatchedKVCache(layout, DeviceMemory(layout.bytes_per_token * 64 * 100), 4096)
    assert cache.open(640) is not None
    arena, evaluate, grown = cache.groups[0].arena, mx.eval, []

    def fail_at_the_second_layer(*arrays) -> None:
        if isinstance(arrays[0], tuple) and arrays[0][0].shape[1] > 16:
            grown.append(arrays)
            if len(grown) % 2 == 0:
                raise RuntimeError("[malloc] Unable to allocate 1024 bytes.")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", fail_at_the_second_layer)
    assert cache.open(1280) is None
    assert [arena.keys[layer].shape[1] for layer in (0, 1)] == [arena.blocks] * 2 == [16, 16]
    cache.check_integrity()


# ---- random operations -----------------------------------------------------------------------------


@pytest.mark.parametrize("refuse", [0.0, 0.2], ids=["granting", "refusing"])
@pytest.mark.parametrize("layers", WITH_STATES.values(), ids=WITH_STATES)
@pytest.mark.parametrize("bits", [None, 8], ids=["full", "quantized"])
@pytest.mark.parametrize(
    ("seeds", "steps"),
    [(range(1), 500), pytest.param(range(1, 9), 2500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["some", "many"],
)
def test_rows_keep_their_content_and_the_books_agree(seeds, steps, bits, layers, refuse, monkeypatch) -> None:
    """6,000 operations in the first stage and 240,000 in the second, at budgets of 15 to 150 blocks."""
    install(monkeypatch)
    for seed in seeds:
        walk = PoolWalk(seed, layers, blocks=(20, 40, 150, 15)[seed % 4], refuse=refuse, bits=bits)
        for _ in range(steps):
            walk.step()


@pytest.mark.parametrize("tokens", [(1, 2, 1, 8), (3, 1, 1, 8), (3, 2, 1, 4), (3, 3, 1, 8)])
def test_tokens_that_do_not_fit_their_lines_are_not_written(tokens: tuple[int, ...]) -> None:
    arena = Arena([LayerSpec(2, 8, 8)], mx.float32)
    arena.resize(4)
    lines = lines_of(np.array([0, 1, 3]), np.array([5, 63, 0]), 2)
    with pytest.raises(ValueError, match="do not fit"):
        arena.write(0, lines, mx.zeros(tokens), mx.zeros(tokens))
    arena.write(0, lines, mx.ones((3, 2, 1, 8)), mx.ones((3, 2, 1, 8)))
    assert arena.keys[0].sum().item() == arena.values[0].sum().item() == 3 * 2 * 8
