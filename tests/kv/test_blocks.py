"""The allocator of blocks: what is free, how it is given out, and that counts and runs agree."""

from __future__ import annotations

import random
import time

from mlx_parallm.kv.blocks import BlockAllocator, FreeRuns


def allocator(total: int) -> BlockAllocator[str]:
    made = BlockAllocator[str]()
    made.resize(total)
    return made


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
