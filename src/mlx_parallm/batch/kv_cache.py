"""The KV pool: rows, not padding.

    class 64      slab  [row][row][    ][row]          a row lives in the class of its length
    class 128     slab  [row   ][row   ]               and moves up one class when full
    class 4096    slab  [row                       ]

Insert, finish and growth touch one row and never copy another. Capacity is at most twice a row's
length (above the smallest class), and a class grows by at most as many places as it has live rows.
The budget counts whole slabs, that is, what is really held, and what adapters and training have of it.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlx_parallm.batch.slab import KVRow, Slab
from mlx_parallm.model.device import is_out_of_memory
from mlx_parallm.model.layout import KVLayout

MIN_CAPACITY = 64
"""Tokens of the smallest class."""

_SLAB_TOKENS = 2048
_SLAB_ROWS = 16
_MOST_SLAB_ROWS = 32
"""A class's first slab has 16 rows, fewer where that would pass 2048 tokens, at least one. Every later slab
is as large as what the class has live, up to 32 rows: few slabs, few attention calls."""


class LoRABatchedKVCache:
    """Rows of keys and values within a byte budget.

    Args:
        layout: shapes and dtype of one token's keys and values.
        budget_bytes: upper bound of the bytes held by slabs. A growing row's copy may pass it for
            the moment of the move.
        max_length: longest row in tokens; the largest class is no larger than it needs to be.
    """

    def __init__(self, layout: KVLayout, budget_bytes: int, max_length: int) -> None:
        self.layout = layout
        self.budget_tokens = budget_bytes // layout.bytes_per_token
        self.max_length = max_length
        self._reserved_tokens = 0
        self._refused_at = math.inf  # tokens held when the device last refused a slab
        self._classes: dict[int, list[Slab]] = {}

    def reserve(self, count: int) -> None:
        """So many bytes of the budget are taken by others now: rows that grow find less, and the youngest make way.

        A row that is alone may have them all the same: what can be held at all is served.
        """
        self._reserved_tokens = -(-count // self.layout.bytes_per_token)

    # -- rows ------------------------------------------------------------------------------------

    def allocate(self, tokens: int) -> KVRow | None:
        """A row that can hold `tokens`; None when the budget is spent, or the device has no memory and rows that hold
        some will end. Raises what the device raises where there is none; then, too, every row is as it was."""
        capacity = self.capacity_for(tokens)
        slab = self._slab_with_room(capacity) or self._add_slab(capacity, credit=0)
        return None if slab is None else _occupy(slab)

    def grow(self, row: KVRow, tokens: int) -> bool:
        """Makes `row` hold `tokens`, moving it up a class if need be; False where `allocate` gives None. Raises as
        `allocate` does."""
        if tokens <= row.capacity:
            return True
        capacity = self.capacity_for(tokens)
        # The slab a lone row leaves behind is given back, so it counts as room for the new one.
        credit = row.slab.tokens if row.slab.used == 1 else 0
        slab = self._slab_with_room(capacity) or self._add_slab(capacity, credit)
        if slab is None:
            return False
        return self._move(row, slab)

    def fork(self, source: KVRow, length: int, tokens: int) -> KVRow | None:
        """A new row for `tokens` that starts as a copy of the first `length` tokens of `source`."""
        row = self.allocate(max(tokens, length))
        return row if row is not None and self._fill(row, source, length) else None

    def free(self, row: KVRow) -> None:
        self._vacate(row.slab, row.index)

    def clear(self) -> None:
        """Forgets every row and array. For use after a failed step, whose arrays cannot be trusted."""
        self._classes.clear()

    # -- figures ---------------------------------------------------------------------------------

    def capacity_for(self, tokens: int) -> int:
        """The class of a row of that length: a power of two, or the longest length if that is less."""
        if tokens > self.max_length:
            raise ValueError(f"a row of {tokens} tokens passes the longest length {self.max_length}")
        return min(max(MIN_CAPACITY, 1 << (tokens - 1).bit_length()), max(self.max_length, MIN_CAPACITY))

    def can_ever_hold(self, tokens: int) -> bool:
        """Whether a row of that length fits the budget when it is alone."""
        return tokens <= self.max_length and self.capacity_for(tokens) <= self.budget_tokens

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that fits the budget when it is alone."""
        fits = [length for length in (self.max_length, _power_below(self.budget_tokens)) if self.can_ever_hold(length)]
        return max(fits, default=0)

    @property
    def tokens_held(self) -> int:
        return sum(slab.tokens for slab in self.slabs())

    @property
    def tokens_used(self) -> int:
        return sum(row.length for row in self.rows())

    @property
    def bytes_held(self) -> int:
        return self.tokens_held * self.layout.bytes_per_token

    @property
    def bytes_reserved(self) -> int:
        return self._reserved_tokens * self.layout.bytes_per_token

    @property
    def budget_bytes(self) -> int:
        return self.budget_tokens * self.layout.bytes_per_token

    def slabs(self) -> list[Slab]:
        return [slab for capacity in sorted(self._classes) for slab in self._classes[capacity]]

    def rows(self) -> list[KVRow]:
        """Live rows in the order in which a decode step batches them: slab by slab, place by place."""
        return [row for slab in self.slabs() for row in slab.places if row is not None]

    def check_integrity(self) -> None:
        """Raises AssertionError when the pool's books do not agree with its rows."""
        for capacity, slabs in self._classes.items():
            for slab in slabs:
                assert slab.capacity == capacity
                assert slab.used > 0, "an empty slab is given back"
                for index, row in enumerate(slab.places):
                    assert row is None or (row.slab is slab and row.index == index and 0 <= row.length <= capacity)
        assert self.tokens_held <= self.budget_tokens, (self.tokens_held, self.budget_tokens)

    # -- slabs -----------------------------------------------------------------------------------

    def _slab_with_room(self, capacity: int) -> Slab | None:
        return next((s for s in self._classes.get(capacity, []) if s.free_index() is not None), None)

    def _add_slab(self, capacity: int, credit: int) -> Slab | None:
        held = self.tokens_held - credit
        room = self.budget_tokens - held - (self._reserved_tokens if held else 0)
        rows = min(self._slab_rows(capacity), room // capacity)
        if rows < 1 or (held and self.tokens_held >= self._refused_at):
            return None
        slab = self._new_slab(capacity, rows, held)
        if slab is None and rows > 1:
            slab = self._new_slab(capacity, 1, held)
        self._refused_at = math.inf if slab else self.tokens_held
        if slab is not None:
            self._classes.setdefault(capacity, []).append(slab)
        return slab

    def _new_slab(self, capacity: int, rows: int, held: int) -> Slab | None:
        """None where the device has no memory for it, unless nothing that is held can ever be given back."""
        try:
            slab = Slab(self.layout, capacity, rows)
            mx.eval(slab.arrays())  # here, where it is accounted for, not inside the next forward
        except Exception as error:
            if not is_out_of_memory(error) or (rows == 1 and not held):
                raise
            mx.clear_cache()
            return None
        return slab

    def _slab_rows(self, capacity: int) -> int:
        live = sum(slab.used for slab in self._classes.get(capacity, []))
        first = max(1, min(_SLAB_ROWS, _SLAB_TOKENS // capacity))
        return min(_MOST_SLAB_ROWS, max(first, live))

    def _move(self, row: KVRow, slab: Slab) -> bool:
        """False where `_fill` is."""
        place = _occupy(slab)
        if not self._fill(place, row, row.length):
            return False
        self._vacate(row.slab, row.index)
        slab.places[place.index] = row
        row.slab, row.index = slab, place.index
        return True

    def _fill(self, row: KVRow, source: KVRow, length: int) -> bool:
        """Copies the first `length` tokens of `source` into a new row, or frees that; False where the device has no
        memory and other rows hold some."""
        try:
            _copy(source.slab, source.index, row.slab, row.index, length)
        except Exception as error:
            self.free(row)
            if not is_out_of_memory(error) or len(self.rows()) == 1:
                raise
            mx.clear_cache()
            return False
        row.length = length
        return True

    def _vacate(self, slab: Slab, index: int) -> None:
        slab.places[index] = None
        if slab.used == 0:
            self._classes[slab.capacity].remove(slab)
            if not self._classes[slab.capacity]:
                del self._classes[slab.capacity]


def _power_below(tokens: int) -> int:
    """The largest power of two that is at most `tokens` (at least 1)."""
    return 1 << max(tokens, 1).bit_length() - 1


def _occupy(slab: Slab) -> KVRow:
    index = slab.free_index()
    assert index is not None
    return slab.occupy(index)


def _copy(source: Slab, source_index: int, target: Slab, target_index: int, length: int) -> None:
    """Copies the first `length` tokens of one row.

    The copies are made before the writes start: a pending view of an array would make the next
    write to it copy the whole slab instead of updating it in place.
    """
    if length == 0:
        return
    rows, tokens = slice(source_index, source_index + 1), slice(0, length)
    spans = [source.span(layer, rows, tokens) for layer in range(len(source.keys))]
    copies = [(mx.contiguous(k), mx.contiguous(v)) for k, v in spans]
    del spans
    mx.eval(copies)
    for layer, (keys, values) in enumerate(copies):
        target.write_span(layer, target_index, 0, keys, values)
