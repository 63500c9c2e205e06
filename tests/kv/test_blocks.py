"""The allocator of blocks: what is free, how it is given out, and that counts and runs agree."""

from __future__ import annotations

import random
import time

import pytest

from mlx_parallm.kv.blocks import BlockAllocator, FreeRuns, blocks_for


def allocator(total: int) -> BlockAllocator[str]:
    made = BlockAllocator[str]()
    made.resize(total)
    return made


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_blocks_for(tokens, blocks) -> None:
    assert blocks_for(tokens) == blocks


def test_free_runs_are_a_set_of_places() -> None:
    rng, runs, model = random.Random(0), FreeRuns(), set()
    for _ in range(3000):
        start, length = rng.randrange(60), rng.randint(1, 8)
        span = set(range(start, start + length))
        if not span & model:
            runs.add(start, length)
            model |= span
        elif span <= model:
            runs.remove(start, length)
            model -= span
        assert runs.ids() == model
        assert runs.count == len(model)
        assert runs.first(len(model) // 2) == sorted(model)[: len(model) // 2]
        assert runs.consecutive(start) == next(i for i in range(70) if start + i not in model)
        if (found := runs.find(length)) is not None:
            assert set(range(found, found + length)) <= model
        else:
            assert not any(set(range(i, i + length)) <= model for i in range(60))


def test_a_long_run_is_found_among_the_lowest_ones_and_the_highest_only() -> None:
    """So a search is short, however many runs there are."""
    runs = FreeRuns()
    for number in range(50):
        runs.add(10 * number)
    runs.add(481, 3)
    assert runs.find(4) is None, "it is the last but one"
    runs.add(491, 3)
    assert runs.find(4) == 490
    runs.add(11, 3)
    assert runs.find(4) == 10


def test_a_row_goes_on_after_its_last_place() -> None:
    pool = allocator(20)
    first = pool.allocate(3)
    pool.allocate(2)
    other = pool.allocate(1, after=4)
    assert (first, other) == ([0, 1, 2], [5])
    assert pool.allocate(2, after=other[-1]) == [6, 7]


def test_a_row_goes_on_after_its_last_block_though_a_lower_one_is_free() -> None:
    pool = allocator(20)
    pool.allocate(5)
    pool.release(1)
    assert pool.allocate(1, after=4) == [5]
    pool.allocate(1)
    pool.allocate(1, after=5)
    assert pool.allocate(1, after=6) == [7]


def test_a_new_row_takes_a_run_that_holds_it_before_scattered_places() -> None:
    pool = allocator(20)
    pool.allocate(12)
    for block_id in (1, 3, 4, 7):
        pool.release(block_id)
    assert pool.allocate(2) == [3, 4]
    assert pool.allocate(4) == [12, 13, 14, 15]
    assert pool.allocate(6) == [1, 7, 16, 17, 18, 19], "no run is long enough, so the lowest blocks"
    assert pool.free == 0


def test_a_shared_place_is_free_after_its_last_row() -> None:
    pool = allocator(2)
    (block_id,) = pool.allocate(1)
    pool.acquire(block_id)
    assert not pool.is_private(block_id)
    pool.release(block_id)
    assert pool.is_private(block_id)
    assert (pool.used, pool.free) == (1, 1)
    pool.release(block_id)
    assert (pool.used, pool.free) == (0, 2)
    pool.check_integrity()


def test_an_owned_place_without_rows_is_cached_until_it_is_disowned() -> None:
    pool = allocator(2)
    (block_id,) = pool.allocate(1)
    pool.cache(block_id, "node")
    assert not pool.is_private(block_id)
    pool.release(block_id)
    assert (pool.used, pool.cached, pool.free) == (0, 1, 1)
    pool.acquire(block_id)
    assert (pool.used, pool.cached) == (1, 0)
    pool.release(block_id)
    pool.uncache(block_id)
    assert (pool.cached, pool.free) == (0, 2)
    pool.check_integrity()


def test_a_place_that_is_disowned_while_rows_read_it_stays_with_them() -> None:
    pool = allocator(1)
    (block_id,) = pool.allocate(1)
    pool.cache(block_id, "node")
    pool.uncache(block_id)
    assert (pool.used, pool.is_private(block_id)) == (1, True)
    pool.check_integrity()


def test_idle_owners_are_in_the_order_in_which_rows_let_go_of_them_also_after_a_move() -> None:
    pool = allocator(10)
    taken = pool.allocate(3)
    for block_id, owner in zip(taken, "abc", strict=True):
        pool.cache(block_id, owner)
    for block_id in (1, 0, 2):
        pool.release(block_id)
    pool.move(1, 7)
    assert list(pool.evictable.items()) == [("b", 7), ("a", 0), ("c", 2)]
    pool.check_integrity()


def test_moves_bring_the_highest_places_down_in_order() -> None:
    pool = allocator(12)
    pool.allocate(12)
    for block_id in (1, 2, 3, 6, 9):
        pool.release(block_id)
    moves = pool.moves_below(7, 10)
    assert moves == [(7, 1), (8, 2), (10, 3), (11, 6)]
    assert pool.moves_below(7, 2) == moves[:2]
    for source, target in moves:
        pool.move(source, target)
    assert pool.moves_below(7, 10) == []
    pool.resize(7)
    assert (pool.total, pool.free, pool.used) == (7, 0, 7)
    pool.check_integrity()


def test_growing_adds_free_places_to_the_last_run() -> None:
    pool = allocator(4)
    pool.allocate(2)
    pool.resize(8)
    assert pool.allocate(6) == [2, 3, 4, 5, 6, 7]


def test_taking_and_releasing_do_not_slow_down_with_ten_thousand_places() -> None:
    """Every second block_id is free, so there are 5,000 runs."""
    pool = allocator(10_000)
    pool.allocate(10_000)
    for block_id in range(0, 10_000, 2):
        pool.release(block_id)
    started = time.thread_time()
    for _ in range(1000):
        for block_id in pool.allocate(4, after=5001):
            pool.release(block_id)
    assert (time.thread_time() - started) / 1000 < 1e-3
