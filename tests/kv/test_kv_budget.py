"""The KV pool stays within its budget, and copes with a device that has no memory."""

from __future__ import annotations

import sys

import mlx.core as mx
import pytest
from pool_walk import FULL
from pools import MODELS, TEXT, WITH_STATES, cached, computed, found, pool, reserve

from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.model.layer_state import KVLayout

# ---- the budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "longest"), [(0, 0), (1, 64), (4, 256), (78, 4992), (79, 5000), (200, 5000)])
def test_longest_row_is_what_fits_alone(blocks, longest, tags) -> None:
    cache = pool(blocks, max_length=5000)
    assert cache.longest_row == longest
    if longest < 5000:
        assert cache.open(longest + 1) is None
    if longest:
        assert cache.open(longest) is not None
    with pytest.raises(ValueError, match="5000"):
        cache.open(5001)


def test_rows_hold_little_more_than_they_use(tags) -> None:
    cache = pool(10_000)
    rows = [cache.open(length) for length in [4000, *range(20, 620, 5)]]
    for row, length in zip(rows, [4000, *range(20, 620, 5)], strict=True):
        row.computed = length
    assert cache.bytes_held * 64 <= 1.3 * cache.tokens_used  # half a block a row, and the growth of a sixteenth


def test_an_arena_grows_before_a_prefix_is_evicted_and_the_oldest_goes_first(tags) -> None:
    cache = pool(40)
    for start in (0, 500, 1000):
        cached(cache, TEXT[start : start + 640])
    assert (cache.bytes_cached, cache.evictions) == (30, 0)
    row = cache.open(15 * 64)
    assert row is not None
    assert cache.evictions == 5
    cache.close(row)
    assert found(cache, TEXT[500:1141]) == 640
    assert found(cache, TEXT[:641]) == 320, "the end of the oldest chain is gone"


def test_a_row_that_does_not_fit_evicts_nothing(tags) -> None:
    cache = pool(40)
    computed(cache, TEXT[1000:1960], root=None)
    cached(cache, TEXT[:640])
    assert cache.open(26 * 64) is None
    assert cache.bytes_cached == 10
    assert cache.open(25 * 64) is not None
    cache.check_integrity()


@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_a_row_that_is_alone_gets_the_whole_budget_whatever_came_before(layers, tags) -> None:
    cache = pool(40, layers)
    row = computed(cache, TEXT[:1900])
    cache.release_windows(row)
    cache.close(row, "v1", TEXT[:1900])
    reserve(cache, 10**9)
    row = cache.open(100)
    assert row is not None
    assert cache.extend(row, 40 * 64)
    assert cache.open(1) is None
    cache.check_integrity()


def test_what_is_reserved_is_not_there_for_rows_beside_others(tags) -> None:
    cache = pool(64)
    first = cache.open(64)
    assert first is not None
    reserve(cache, 64 - 16)
    assert cache.open(15 * 64) is not None, "blocks that are held already are free to take"
    assert cache.open(1) is None
    assert not cache.extend(first, 65)
    reserve(cache, 0)
    assert cache.extend(first, 65)
    cache.check_integrity()


def test_a_base_model_takes_cached_prefixes_of_another_one_but_no_rows(tags) -> None:
    sharing: list[DeviceMemory] = []
    first, second = (
        LoRABatchedKVCache(KVLayout((FULL,), mx.float32), DeviceMemory(40, sharing), 10_000) for _ in range(2)
    )
    cached(second, TEXT[:1920])
    kept = computed(second, TEXT[1000:1640], root=None)
    assert (second.bytes_used, second.bytes_cached) == (10, 30)
    row = first.open(15 * 64)
    assert row is not None, "within an equal part, of which the other one has more"
    assert (second.bytes_used, second.bytes_cached) == (10, 15)
    assert first.extend(row, 30 * 64), "beyond that part"
    assert (second.bytes_used, second.bytes_cached) == (10, 0)
    assert not first.extend(row, 31 * 64)
    assert kept in second.rows
    second.close(kept)
    assert first.extend(row, 40 * 64)
    first.close(row)
    assert second.open(64) is not None
    reserve(first, 10)
    assert second.open(30 * 64) is None, "the adapters of the other one stay too"
    assert second.open(29 * 64) is not None
    for cache in (first, second):
        cache.check_integrity()


def test_a_base_model_that_fails_to_give_memory_back_may_use_all_of_it_afterwards(tags, monkeypatch) -> None:
    sharing: list[DeviceMemory] = []
    asking, asked = (
        LoRABatchedKVCache(KVLayout((FULL,), mx.float32), DeviceMemory(40, sharing), 10_000) for _ in range(2)
    )
    cached(asked, TEXT[:1920])
    with monkeypatch.context() as broken:
        broken.setattr(asked.device, "give_back", lambda: (_ for _ in ()).throw(RuntimeError("injected")))
        with pytest.raises(RuntimeError, match="injected"):
            asking.open(30 * 64)
    row = asked.open(20 * 64)
    assert row is not None
    assert asked.open(20 * 64) is not None, "the other base model has nothing"
    assert asking.open(64) is None
    asked.close(row)
    assert asking.open(20 * 64) is not None
    for cache in (asking, asked):
        cache.check_integrity()


# ---- a device without memory -----------------------------------------------------------------------


def test_rows_wait_for_memory_that_others_hold_and_ask_again_once_they_hold_less(tags, monkeypatch) -> None:
    cache = pool(100)
    first, second = cache.open(64), cache.open(15 * 64)
    assert first is not None
    assert second is not None
    tags.refuse = 1.0
    asked = []
    monkeypatch.setattr(tags, "_allocate", lambda self: asked.append(self) or (_ for _ in ()).throw(MemoryError()))
    assert cache.open(640) is None
    tried = len(asked)
    assert tried
    assert cache.open(640) is None
    assert not cache.extend(first, 65)
    assert len(asked) == tried, "the device is not tried at every step"
    monkeypatch.undo()
    cache.close(second)
    assert cache.device_refused
    assert cache.extend(first, 65)
    assert cache.open(20 * 64) is not None
    assert not cache.device_refused
    cache.check_integrity()


def test_a_row_that_is_alone_gets_the_memory_error(tags) -> None:
    cache = pool(100)
    tags.refuse = 1.0
    with pytest.raises(RuntimeError, match="malloc"):
        cache.open(10)
    assert (list(cache.rows), cache.bytes_held) == ([], 0)
    tags.refuse = 0.0
    row = cache.open(64)
    assert row is not None
    tags.refuse = 1.0
    with pytest.raises(RuntimeError, match="malloc"):
        cache.extend(row, 17 * 64)
    assert (list(cache.rows), row.tables) == ([row], [[0]])
    cache.check_integrity()


def test_a_failed_copy_fails_the_fork_and_only_shortens_what_a_prompt_finds(tags) -> None:
    cache = pool(100)
    source = computed(cache, TEXT[:100])
    cache.close(computed(cache, TEXT[:120]), "v1", TEXT[:120])
    tags.refuse = 1.0
    assert cache.fork(source, 90, 90) is None
    assert list(cache.rows) == [source]
    assert found(cache, TEXT[:150]) == 64
    tags.refuse = 0.0
    assert found(cache, TEXT[:150]) == 120
    assert cache.fork(source, 90, 90) is not None


def test_cached_prefixes_give_way_when_the_device_refuses_to_grow(tags) -> None:
    cache = pool(100)
    cached(cache, TEXT[:960])
    tags.refuse = 1.0
    assert cache.open(640) is not None
    assert cache.bytes_cached == 6
    cache.check_integrity()


def test_a_row_without_memory_for_a_block_of_its_own_waits(tags) -> None:
    """It went back to within a block that another row reads as well."""
    cache = pool(100)
    reader, writer = computed(cache, TEXT[:128]), computed(cache, TEXT[:128])
    cache.truncate(writer, 100)
    tags.refuse = 1.0
    assert not cache.extend(writer, 101)
    assert writer.tables == reader.tables
    tags.refuse = 0.0
    assert cache.extend(writer, 101)
    assert writer.tables[0][0] == reader.tables[0][0]
    assert writer.tables[0][1] != reader.tables[0][1]
    cache.check_integrity()


def test_a_row_gives_up_its_cached_prefix_if_it_fits_only_without_the_state_at_its_end(tags) -> None:
    cache = pool(2, WITH_STATES["recurrent"])  # room for two blocks and two states, or three blocks and one
    row = cache.open(128)
    assert row is not None
    cache.reserve_checkpoint(row, 64)
    for length in (64, 128):
        row.computed = length
        cache.freeze(row, "v1", TEXT[:128])
    cache.close(row, "v1", TEXT[:128])
    assert found(cache, TEXT[:128]) == 64
    row = cache.open(192, "v1", TEXT[:192])
    assert row is not None
    assert row.computed == 0
    cache.check_integrity()


def test_a_state_from_the_disk_is_refused_if_its_prefix_must_go_for_it_or_nothing_is_left(tags) -> None:
    cache = pool(2, WITH_STATES["recurrent"])
    cached(cache, TEXT[:64])
    (node,) = cache.index.chain("v1", TEXT[:65])
    row = cache.open(128)
    assert row is not None
    assert cache.bytes_cached == 1
    assert not cache.checkpoints.restore(node, [])
    assert cache.bytes_cached == 0
    assert cache.extend(row, 192)
    assert not cache.checkpoints.restore(node, [])
    cache.check_integrity()


# ---- between two units -----------------------------------------------------------------------------


def test_arenas_keep_some_room_for_the_next_rows_and_more_for_a_cache_that_grows(tags, monkeypatch) -> None:
    monkeypatch.setattr("mlx_parallm.kv.memory._SPARE_BYTES_FOR_CACHE", 120)  # 60 blocks of two layers
    cache = pool(2000, MODELS["full"], max_length=320 * 64)
    blocks = cache.groups[0].allocator

    def tidied(quiet: bool = False) -> int:
        while cache.tidy(sys.maxsize, quiet):
            pass
        cache.check_integrity()
        assert cache.groups[0].arena.blocks == blocks.total
        return blocks.free

    assert tidied() == 0, "nothing has run"
    row = cache.open(320 * 64)
    assert row is not None
    assert tidied() == 20, "a sixteenth of what rows use"
    cached(cache, TEXT[:1280])
    assert tidied() == 20 + 20, "and as much again as is cached"
    for start in range(1, 6):
        cached(cache, TEXT[start : start + 1280], root=str(start))
    assert cache.groups[0].spare_blocks() == 20 + 60, "or a number of bytes"
    for start in range(6, 10):
        cached(cache, TEXT[start : start + 1280], root=str(start))
    assert cache.groups[0].spare_blocks() == 20 + 100, "or half of what is cached"
    assert tidied(quiet=True) == 20, "no row has opened for a while"
    cache.close(row)
    assert tidied(quiet=True) > 0
    assert blocks.cached == 200
    cache.index.reset()
    assert tidied() == 16, "the next row need not wait"
    assert tidied(quiet=True) == 0
