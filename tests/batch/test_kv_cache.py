"""The KV pool: bounded waste, one row touched at a time, slabs and rows that always agree."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tiny import tiny_model

from mlx_parallm.batch.kv_cache import LoRABatchedKVCache
from mlx_parallm.batch.slab import KVRow
from mlx_parallm.model.families import KVLayout, LayerSpec

LAYOUT = KVLayout((LayerSpec(2, 4, 3), LayerSpec(1, 2, 2, window=8)), mx.float32)
TOKEN_BYTES = (2 * (4 + 3) + 1 * (2 + 2)) * 4


def pool(tokens: int, max_length: int = 8192) -> LoRABatchedKVCache:
    return LoRABatchedKVCache(LAYOUT, tokens * TOKEN_BYTES, max_length)


def fill(row: KVRow, length: int, value: float) -> None:
    """Writes `value` into the first `length` tokens."""
    for layer, spec in enumerate(LAYOUT.layers):
        keys = mx.full((1, spec.kv_heads, length, spec.head_dim_k), value)
        row.slab.write_span(layer, row.index, 0, keys, mx.full((1, spec.kv_heads, length, spec.head_dim_v), -value))
    row.length = length


def content(row: KVRow) -> set[float]:
    """Every distinct number in a row's written tokens, sign aside."""
    found: set[float] = set()
    for layer in range(len(LAYOUT.layers)):
        for array in row.slab.span(layer, slice(row.index, row.index + 1), slice(0, row.length)):
            found |= set(mx.abs(array).flatten().tolist())
    return found


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.bytes_per_token == TOKEN_BYTES


def test_one_long_row_beside_fifteen_short_ones_holds_at_most_twice_the_tokens_in_use() -> None:
    """mlx-lm's padded batch holds 13.4 times the tokens in use here."""
    cache = pool(1 << 20)
    lengths = [4000] + [20 + 3 * i for i in range(15)]
    for length in lengths:
        row = cache.allocate(length)
        assert row is not None
        row.length = length
    assert cache.tokens_used == sum(lengths)
    assert cache.tokens_held <= 2 * cache.tokens_used


def test_insert_grow_and_finish_leave_other_rows_arrays_alone() -> None:
    cache = pool(1 << 20)
    first, other = cache.allocate(64), cache.allocate(500)
    assert first is not None
    assert other is not None
    fill(other, 500, 3.0)
    before = other.slab.keys[0]
    assert cache.grow(first, 65)
    cache.free(first)
    assert cache.allocate(10) is not None
    assert other.slab.keys[0] is before


def test_growing_moves_a_row_up_a_class_with_its_content() -> None:
    cache = pool(1 << 20)
    row = cache.allocate(64)
    assert row is not None
    fill(row, 64, 5.0)
    assert cache.grow(row, 65)
    assert (row.capacity, row.length, content(row)) == (128, 64, {5.0})
    cache.check_integrity()


def test_a_fork_is_a_copy() -> None:
    cache = pool(1 << 20)
    source = cache.allocate(40)
    assert source is not None
    fill(source, 40, 7.0)
    fork = cache.fork(source, 30, 40)
    assert fork is not None
    assert (fork.length, content(fork)) == (30, {7.0})
    fill(source, 40, 9.0)
    assert content(fork) == {7.0}


def test_budget_is_never_passed_and_comes_back() -> None:
    cache = pool(256)
    rows = [cache.allocate(60) for _ in range(4)]
    assert all(rows)
    assert cache.allocate(1) is None
    assert not cache.grow(rows[0], 65)
    for row in rows:
        cache.free(row)
    assert cache.tokens_held == 0
    assert cache.allocate(200) is not None


def test_a_lone_row_may_grow_to_the_whole_budget() -> None:
    cache = pool(256)
    row = cache.allocate(120)
    assert row is not None
    fill(row, 120, 1.0)
    assert cache.grow(row, 129)
    assert row.capacity == 256
    cache.check_integrity()


@pytest.mark.parametrize(("budget", "longest"), [(100, 64), (256, 256), (300, 256), (9000, 5000), (40, 0)])
def test_longest_row_is_what_fits_alone(budget: int, longest: int) -> None:
    cache = pool(budget, max_length=5000)
    assert cache.longest_row == longest
    if longest < 5000:
        assert cache.allocate(longest + 1) is None
    assert longest == 0 or cache.allocate(longest) is not None


def test_decode_writes_update_arrays_in_place() -> None:
    """A step must not copy the pool: its memory grows by the step's activations only."""
    model = tiny_model("llama")
    cache = LoRABatchedKVCache(KVLayout((LayerSpec(8, 64, 64),), mx.float32), 1 << 30, 4096)
    row = cache.allocate(4096)
    assert row is not None
    mx.eval(row.slab.arrays(), model.parameters())
    slab_bytes = sum(array.nbytes for array in row.slab.arrays())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for position in range(3):
        token = mx.ones((1, 8, 1, 64))
        row.length = position
        row.slab.write(0, row.slab.lines([row], 8), token, token)
        mx.eval(row.slab.arrays())
        row.slab.write_span(0, row.index, 100 * position, mx.ones((1, 8, 50, 64)), mx.ones((1, 8, 50, 64)))
        mx.eval(row.slab.arrays())
    assert mx.get_peak_memory() - before < slab_bytes / 4


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, write, grow, fork and free; every row keeps its own content."""

    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.cache = pool(2000, max_length=1000)
        self.values: dict[int, tuple[KVRow, float]] = {}
        self.next_value = 1.0

    def _fill(self, row: KVRow, length: int) -> None:
        fill(row, length, self.next_value)
        self.values[id(row)] = (row, self.next_value)
        self.next_value += 1.0

    @rule(target=rows, tokens=st.integers(1, 400))
    def allocate(self, tokens: int) -> KVRow | None:
        row = self.cache.allocate(tokens)
        if row is not None:
            self._fill(row, tokens)
        return row

    @rule(row=rows, more=st.integers(1, 300))
    def grow(self, row: KVRow | None, more: int) -> None:
        if row is not None and id(row) in self.values and row.length + more <= 1000:
            self.cache.grow(row, row.length + more)

    @rule(target=rows, row=rows)
    def fork(self, row: KVRow | None) -> KVRow | None:
        if row is None or id(row) not in self.values:
            return None
        fork = self.cache.fork(row, row.length, row.length)
        if fork is not None:
            self.values[id(fork)] = (fork, self.values[id(row)][1])
        return fork

    @rule(row=consumes(rows))
    def free(self, row: KVRow | None) -> None:
        if row is not None and self.values.pop(id(row), None):
            self.cache.free(row)

    @invariant()
    def books_agree(self) -> None:
        self.cache.check_integrity()
        assert {id(row) for row in self.cache.rows()} == set(self.values)

    @invariant()
    def rows_keep_their_content(self) -> None:
        for row, value in self.values.values():
            assert content(row) == {value}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


# ---- memory that others hold ---------------------------------------------------------------------


def test_what_is_reserved_is_not_there_for_rows_beside_others() -> None:
    cache = pool(4096)
    first = cache.allocate(200)
    assert first is not None
    cache.bytes_reserved = (4096 - cache.tokens_held) * TOKEN_BYTES
    beside = cache.allocate(200)
    assert beside is not None, "a place that is held already is free to take"
    assert cache.allocate(600) is None
    assert not cache.grow(first, 300)
    cache.bytes_reserved = 0
    assert cache.grow(first, 300)
    cache.check_integrity()


def test_a_row_that_is_alone_is_served_whatever_is_reserved() -> None:
    cache = pool(1024)
    cache.bytes_reserved = 10**12
    row = cache.allocate(100)
    assert row is not None
    assert cache.grow(row, 1000)
    assert cache.allocate(10) is None
    cache.check_integrity()


def test_rows_that_are_there_stay_when_more_is_reserved() -> None:
    cache = pool(4096)
    rows = [cache.allocate(64) for _ in range(40)]
    cache.bytes_reserved = 4096 * TOKEN_BYTES
    assert set(cache.rows()) == set(rows)
    cache.check_integrity()


# ---- a device without memory -----------------------------------------------------------------------


class Device:
    """Refuses arrays of more than `most` numbers, as MLX says it; counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self.refusals = 1 << 30, 0
        self._evaluate = mx.eval
        monkeypatch.setattr(mx, "eval", self._eval)

    def _eval(self, arrays: list[mx.array] | list[tuple[mx.array, mx.array]]) -> None:
        first = arrays[0][0] if isinstance(arrays[0], tuple) else arrays[0]
        if first.size > self.most:
            self.refusals += 1
            raise RuntimeError("[metal::malloc] Unable to allocate 1024 bytes.")
        self._evaluate(arrays)


def test_a_slab_that_the_device_refuses_is_made_with_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, device = pool(1 << 20), Device(monkeypatch)
    device.most = 128 * LAYOUT.layers[0].kv_heads * LAYOUT.layers[0].head_dim_k
    row = cache.allocate(100)
    assert row is not None
    assert len(row.slab.places) == 1


def test_rows_wait_for_memory_that_others_hold_and_ask_again_once_they_hold_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, device = pool(1 << 20), Device(monkeypatch)
    first, second = cache.allocate(64), cache.allocate(500)
    assert first is not None
    assert second is not None
    fill(first, 64, 3.0)
    device.most = 0
    assert cache.allocate(2000) is None
    refusals = device.refusals
    assert cache.allocate(2000) is None
    assert cache.grow(first, 65) is False
    assert device.refusals == refusals, "the device is not tried at every step"
    cache.check_integrity()
    device.most = 1 << 30
    assert cache.allocate(2000) is None
    cache.free(second)
    assert cache.grow(first, 65) is True
    assert content(first) == {3.0}
    assert cache.allocate(2000) is not None
    cache.check_integrity()


def test_a_row_that_is_alone_gets_the_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, device = pool(1 << 20), Device(monkeypatch)
    device.most = 0
    with pytest.raises(RuntimeError, match="malloc"):
        cache.allocate(10)
    assert cache.tokens_held == 0
    device.most = 1 << 30
    row = cache.allocate(64)
    assert row is not None
    fill(row, 64, 3.0)
    device.most = 0
    with pytest.raises(RuntimeError, match="malloc"):
        cache.grow(row, 65)
    cache.check_integrity()
    assert (cache.rows(), content(row)) == ([row], {3.0})


def test_a_failed_copy_leaves_every_row_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, device = pool(1 << 20), Device(monkeypatch)
    source, other = cache.allocate(64), cache.allocate(64)
    assert source is not None
    assert other is not None
    fill(source, 64, 3.0)
    assert cache.allocate(100) is not None, "the class above has room"
    device.most = 0
    assert cache.fork(source, 60, 64) is None
    assert cache.grow(source, 65) is False
    cache.check_integrity()
    assert len(cache.rows()) == 3
    assert content(source) == {3.0}
    device.most = 1 << 30
    assert cache.grow(source, 65) is True
    assert content(source) == {3.0}
