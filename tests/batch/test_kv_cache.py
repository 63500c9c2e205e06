"""The KV pool: rows share prefixes, keep their own content, and stay within the budget."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from pool_walk import FULL, WINDOWED, PoolWalk, TagArena, install

from mlx_parallm.batch.kv.blocks import FREED
from mlx_parallm.batch.kv.cache import KVRow, LoRABatchedKVCache
from mlx_parallm.core import Account, DeviceMemory
from mlx_parallm.model.families import KVLayout, LayerSpec

TEXT = [(i * i) % 251 for i in range(2000)]
MODELS = {"full": [FULL, FULL], "mixed": [FULL, WINDOWED, WINDOWED], "windowed": [WINDOWED]}


@pytest.fixture
def tags(monkeypatch: pytest.MonkeyPatch) -> type[TagArena]:
    install(monkeypatch)
    return TagArena


def pool(blocks: int, layers: Sequence[LayerSpec] = (FULL,), max_length: int = 10_000, **kwargs) -> LoRABatchedKVCache:
    """A pool with a budget of `blocks` blocks; only with tags, of which a block counts one byte for each layer."""
    return LoRABatchedKVCache(
        KVLayout(tuple(layers), mx.float32), DeviceMemory(blocks * len(layers)), max_length, **kwargs
    )


def reserve(cache: LoRABatchedKVCache, nbytes: int) -> None:
    """Others hold so much of the budget."""
    cache.device.open_account(Account.ADAPTERS, lambda: nbytes)


def computed(cache: LoRABatchedKVCache, ids: Sequence[int], root: str | None = "v1") -> KVRow:
    """A row that has computed `ids` and registered them."""
    row = cache.open(len(ids), root, ids)
    assert row is not None
    row.computed = len(ids)
    if root is not None:
        cache.freeze(row, root, ids)
    return row


def cached(cache: LoRABatchedKVCache, ids: Sequence[int], root: str = "v1") -> None:
    cache.close(computed(cache, ids, root), root, ids)


def found(cache: LoRABatchedKVCache, ids: Sequence[int], root: str = "v1") -> int:
    row = cache.open(len(ids), root, ids)
    assert row is not None
    length = row.computed
    cache.close(row)
    cache.check_integrity()
    return length


# ---- the cache of prefixes -----------------------------------------------------------------------


@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_a_second_turn_starts_with_all_of_the_first_at_every_alignment(layers, tags) -> None:
    for length in range(700, 764):
        cache = pool(100, layers)
        cached(cache, TEXT[:length])
        assert found(cache, [*TEXT[:length], *range(300, 350)]) == (length if length % 64 >= 8 else length // 64 * 64)


def test_the_same_prompt_again_leaves_one_token_to_compute(tags) -> None:
    cache = pool(100)
    cached(cache, TEXT[:192])
    assert found(cache, TEXT[:192]) == 191
    assert (cache.queries, cache.hits) == (384, 191)


def test_other_roots_find_nothing_and_no_root_does_not_look(tags) -> None:
    cache = pool(100)
    cached(cache, TEXT[:300])
    assert found(cache, TEXT[:300], root="v2") == 0
    row = cache.open(300)
    assert row is not None
    assert row.computed == 0


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


def test_blocks_are_registered_as_far_as_their_tokens_are_known(tags) -> None:
    cache = pool(100)
    row = cache.open(300)
    assert row is not None
    row.computed = 256
    cache.freeze(row, "v1", TEXT[:255])
    assert found(cache, TEXT[:300]) == 192


def test_without_a_prefix_cache_nothing_is_kept(tags) -> None:
    cache = pool(100, keep_prefixes=False)
    cached(cache, TEXT[:300])
    assert found(cache, TEXT[:300]) == 0
    assert (cache.bytes_cached, cache.queries) == (0, 0)


def test_a_dropped_root_is_not_found_and_what_live_rows_read_stays(tags) -> None:
    cache = pool(100)
    row = computed(cache, TEXT[:300])
    cached(cache, TEXT[:200], root="v2")
    cache.drop("v1")
    assert (found(cache, TEXT), found(cache, TEXT, root="v2")) == (0, 200)
    assert row.tables[0] == [0, 1, 2, 3, 4]
    cache.reset()
    assert (cache.bytes_cached, found(cache, TEXT, root="v2")) == (0, 0)


def test_a_row_that_goes_on_after_a_reset_registers_all_of_its_blocks(tags) -> None:
    cache = pool(100)
    row = computed(cache, TEXT[:192])
    cache.reset()
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


def test_a_row_that_shares_its_only_block_leaves_no_empty_root(tags) -> None:
    cache = pool(100)
    row, _reader = computed(cache, TEXT[:64]), computed(cache, TEXT[:65])
    cache.reset()
    cache.truncate(row, 20)
    cache.close(row, "v1", TEXT[:20])
    cache.check_integrity()


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


def test_sixteen_samples_of_a_prompt_hold_it_once(tags) -> None:
    cache = pool(100)
    source = computed(cache, TEXT[:640])
    forks = [cache.fork(source, 640, 660) for _ in range(15)]
    assert all(forks)
    assert cache.tokens_used == 640
    assert sum(group.places.used for group in cache.groups) == 10 + 15


# ---- windows ---------------------------------------------------------------------------------------


def test_a_window_gives_back_what_no_token_attends_to(tags) -> None:
    cache = pool(100, MODELS["mixed"])
    row = computed(cache, TEXT[:640], root=None)
    cache.release_windows(row)
    full, windowed = row.tables
    assert FREED not in full
    assert windowed[:8] == [FREED] * 8  # token 640 attends to positions from 541 on
    assert FREED not in windowed[8:]
    assert cache.groups[1].places.used == 2
    cache.check_integrity()


def test_blocks_below_a_window_stay_cached_until_their_memory_is_needed(tags) -> None:
    cache = pool(100, MODELS["mixed"])
    row = computed(cache, TEXT[:640])
    cache.release_windows(row)
    assert found(cache, [*TEXT[:320], *range(300, 340)]) == 320
    assert cache.evict(4) == 4
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


def test_blocks_that_a_window_gave_back_before_they_were_registered_leave_no_empty_nodes(tags) -> None:
    cache = pool(100, [LayerSpec(1, 2, 2, window=5)])
    row = cache.open(320)
    assert row is not None
    row.computed = 320 + 10 - 64
    cache.release_windows(row)
    cache.freeze(row, "v1", TEXT)
    cache.check_integrity()
    cache.close(row)
    assert (cache.bytes_cached, cache.reset()) == (0, 0)


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


def test_the_budget_is_never_passed_and_comes_back(tags) -> None:
    cache = pool(4)
    rows = [cache.open(60) for _ in range(4)]
    assert all(rows)
    assert cache.open(1) is None
    assert not cache.extend(rows[0], 65)
    for row in rows:
        cache.close(row)
    cache.tidy(1 << 30)
    assert cache.bytes_held <= cache.device.budget_bytes
    assert cache.open(256) is not None


def test_rows_hold_little_more_than_they_use(tags) -> None:
    cache = pool(10_000)
    rows = [cache.open(length) for length in [4000, *range(20, 620, 5)]]
    for row, length in zip(rows, [4000, *range(20, 620, 5)], strict=True):
        row.computed = length
    assert cache.bytes_held * 64 <= 1.3 * cache.tokens_used  # half a block a row, and the growth of a sixteenth


def test_after_a_straggler_the_arena_shrinks(tags) -> None:
    cache = pool(10_000)
    rows = [computed(cache, TEXT[:640], root=None) for _ in range(50)]
    for row in rows[:-1]:
        cache.close(row)
    before = [cache.groups[0].arena.tags[place] for place in rows[-1].tables[0]]
    calls = 1
    while cache.tidy(4, quiet=True):
        calls += 1
        cache.check_integrity()
    assert calls >= 3, "a call moves few blocks"
    assert cache.bytes_held == 10
    assert [cache.groups[0].arena.tags[place] for place in rows[-1].tables[0]] == before
    assert rows[-1].tables[0] == list(range(10))


def test_cached_prefixes_do_not_count_as_held_and_a_tidy_keeps_them(tags) -> None:
    cache = pool(10_000)
    cached(cache, TEXT[:640])
    straggler = computed(cache, TEXT[:640], root=None)
    for row in [computed(cache, TEXT[:640], root=None) for _ in range(20)]:
        cache.close(row)
    while cache.tidy(100, quiet=True):
        pass
    assert (cache.bytes_held, cache.bytes_cached) == (10, 10)
    cache.close(straggler)
    while cache.tidy(100, quiet=True):
        pass
    assert (cache.bytes_held, cache.bytes_cached) == (10, 10), "an idle arena is ready for the next row"
    assert found(cache, TEXT) == 640


def test_an_arena_grows_before_a_row_needs_it_and_nothing_grows_for_nobody(tags) -> None:
    cache = pool(10_000)
    assert not cache.tidy(100)
    assert cache.bytes_held == 0
    rows = [cache.open(6400) for _ in range(10)]
    while cache.tidy(4):
        cache.check_integrity()
    total = cache.groups[0].places.total
    assert total > 1000
    while cache.groups[0].places.total == total:
        rows.append(cache.open(640))
        while cache.tidy(4):
            cache.check_integrity()
        assert cache.groups[0].places.free >= cache.groups[0].places.total // 140
    for row in rows:
        cache.close(row)
    while cache.tidy(100, quiet=True):
        pass
    assert cache.bytes_held == 0


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


def test_a_row_of_the_whole_budget_does_not_wait_for_a_block_that_it_would_copy(tags) -> None:
    cache = pool(10)
    cached(cache, TEXT[:540])
    row = cache.open(640, "v1", TEXT[:640])
    assert row is not None
    assert row.computed == 512
    cache.check_integrity()


def test_what_is_reserved_is_not_there_for_rows_beside_others(tags) -> None:
    cache = pool(64)
    first = cache.open(64)
    assert first is not None
    reserve(cache, 64 - 16)
    assert cache.open(15 * 64) is not None, "places that are held already are free to take"
    assert cache.open(1) is None
    assert not cache.extend(first, 65)
    reserve(cache, 0)
    assert cache.extend(first, 65)
    cache.check_integrity()


def test_cached_prefixes_give_way_first_when_more_is_reserved(tags) -> None:
    cache = pool(64)
    row = computed(cache, TEXT[:640], root=None)
    for start in (0, 500, 1000):
        cached(cache, TEXT[start : start + 640])
    reserve(cache, 40)
    while cache.tidy(100):
        pass
    assert cache.rows() == [row]
    assert cache.bytes_held + cache.bytes_cached <= 24
    assert cache.bytes_cached >= 8
    cache.check_integrity()


def test_clear_drops_rows_arrays_and_prefixes(tags) -> None:
    cache = pool(64)
    cached(cache, TEXT[:640])
    computed(cache, TEXT[:100])
    cache.clear()
    assert (cache.rows(), cache.bytes_held, cache.bytes_cached) == ([], 0, 0)
    assert found(cache, TEXT) == 0


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
    assert cache.extend(first, 65)
    assert cache.open(20 * 64) is not None
    cache.check_integrity()


def test_a_row_that_is_alone_gets_the_memory_error(tags) -> None:
    cache = pool(100)
    tags.refuse = 1.0
    with pytest.raises(RuntimeError, match="malloc"):
        cache.open(10)
    assert (cache.rows(), cache.bytes_held) == ([], 0)
    tags.refuse = 0.0
    row = cache.open(64)
    assert row is not None
    tags.refuse = 1.0
    with pytest.raises(RuntimeError, match="malloc"):
        cache.extend(row, 17 * 64)
    assert (cache.rows(), row.tables) == ([row], [[0]])
    cache.check_integrity()


def test_a_failed_copy_fails_the_fork_and_only_shortens_what_a_prompt_finds(tags) -> None:
    cache = pool(100)
    source = computed(cache, TEXT[:100])
    cache.close(computed(cache, TEXT[:120]), "v1", TEXT[:120])
    tags.refuse = 1.0
    assert cache.fork(source, 90, 90) is None
    assert cache.rows() == [source]
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


# ---- real arrays -----------------------------------------------------------------------------------

SPECS = (LayerSpec(2, 4, 3), LayerSpec(1, 2, 2, window=100), LayerSpec(2, 4, 3))


def write(cache: LoRABatchedKVCache, row: KVRow, block: int, value: float) -> None:
    for group, table in zip(cache.groups, row.tables, strict=True):
        shapes = [(SPECS[i].kv_heads, 64, SPECS[i].head_dim_k, SPECS[i].head_dim_v) for i in group.layers]
        pairs = [(np.full((h, t, k), value), np.full((h, t, v), -value)) for h, t, k, v in shapes]
        group.arena.write_block(table[block], [x.astype(np.float32).view(np.uint8) for pair in pairs for x in pair])


def content(cache: LoRABatchedKVCache, row: KVRow) -> list[set[float]]:
    """Every distinct number in each of a row's blocks, sign aside."""
    return [
        {
            number
            for group, table in zip(cache.groups, row.tables, strict=True)
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
    assert [arena.places(layer) for layer in (0, 1)] == [arena.blocks] * 2 == [16, 16]
    cache.check_integrity()


# ---- random operations -----------------------------------------------------------------------------


@pytest.mark.parametrize("refuse", [0.0, 0.2], ids=["granting", "refusing"])
@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("seeds", "steps"),
    [(range(1), 500), pytest.param(range(1, 9), 2500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["some", "many"],
)
def test_rows_keep_their_content_and_the_books_agree(seeds, steps, layers, refuse, monkeypatch) -> None:
    """3,000 operations in the first stage and 120,000 in the second, at budgets of 15 to 150 blocks."""
    install(monkeypatch)
    for seed in seeds:
        walk = PoolWalk(seed, layers, blocks=(20, 40, 150, 15)[seed % 4], refuse=refuse)
        for _ in range(steps):
            walk.step()
