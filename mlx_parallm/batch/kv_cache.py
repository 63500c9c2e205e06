"""The KV pool: rows of keys and values, stored in slabs by capacity class.

    class 64      slab  [row][row][    ][row]          a row is in the class of its length
    class 128     slab  [row   ][row   ]               and moves up one class when it is full
    class 4096    slab  [row                       ]

Inserting, finishing and growing a row never copies another row. A row's capacity is at most twice its length (above
the smallest class), and a class grows by at most as many places as it has live rows. The budget counts whole slabs,
because they are the memory really allocated, plus the memory that adapters and training use.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlx_parallm.batch.slab import KVRow, Slab
from mlx_parallm.model.device import is_out_of_memory
from mlx_parallm.model.families import KVLayout

MIN_CAPACITY = 64
"""Tokens of the smallest class."""

_SLAB_TOKENS = 2048
_SLAB_ROWS = 16
_MOST_SLAB_ROWS = 32
"""A class's first slab has 16 rows, or fewer to stay within 2048 tokens, but at least one. A later slab has as many
rows as the class has live ones, if that is more, up to 32, because fewer slabs need fewer attention calls."""


class LoRABatchedKVCache:
    """Rows of keys and values within a byte budget.

    Attributes:
        bytes_reserved: bytes of the budget that adapters and training hold now, so that rows find less memory. A row
            that is alone may use them nevertheless, so that every request that fits the budget is served.
        longest_row: tokens of the longest row that fits the budget when it is alone.

    Args:
        layout: shapes and dtype of one token's keys and values.
        budget_bytes: upper bound of the bytes held by slabs. While a growing row is copied, it may be exceeded.
        max_length: longest row in tokens, which also bounds the largest class.
    """

    def __init__(self, layout: KVLayout, budget_bytes: int, max_length: int) -> None:
        self.layout = layout
        self.budget_tokens = budget_bytes // layout.bytes_per_token
        self.max_length = max_length
        self.bytes_reserved = 0
        whole_class = 1 << self.budget_tokens.bit_length() >> 1  # the largest power of two within the budget
        fits = [n for n in (max_length, whole_class) if n <= max_length and self.capacity_for(n) <= self.budget_tokens]
        self.longest_row = max(fits, default=0)
        self._refused_at = math.inf  # tokens held when the device last refused a slab
        self._classes: dict[int, list[Slab]] = {}

    # -- rows ------------------------------------------------------------------------------------

    def allocate(self, tokens: int) -> KVRow | None:
        """A new row that can hold `tokens`.

        Returns:
            None if the budget is spent, or if the device is out of memory and live rows will free some.

        Raises:
            Exception: the device's own error, in all other cases where it fails. Existing rows are unchanged.
        """
        capacity = self.capacity_for(tokens)
        slab = self._slab_with_room(capacity) or self._add_slab(capacity, credit=0)
        return None if slab is None else _occupy(slab)

    def grow(self, row: KVRow, tokens: int) -> bool:
        """Makes room for `tokens` in `row`, which may move to another class.

        Returns False, and raises, in the same cases as `allocate` returns None and raises.
        """
        if tokens <= row.capacity:
            return True
        capacity = self.capacity_for(tokens)
        # If the row is alone in its slab, the slab is freed by the move and counts as room for the new one.
        credit = row.slab.tokens if row.slab.used == 1 else 0
        slab = self._slab_with_room(capacity) or self._add_slab(capacity, credit)
        if slab is None:
            return False
        return self._move(row, slab)

    def fork(self, source: KVRow, length: int, tokens: int) -> KVRow | None:
        """A new row for `tokens` that starts with the first `length` tokens of `source`; None as in `allocate`."""
        row = self.allocate(max(tokens, length))
        return row if row is not None and self._fill(row, source, length) else None

    def free(self, row: KVRow) -> None:
        self._free_place(row.slab, row.index)

    def clear(self) -> None:
        """Drops all rows and arrays. Used after a failed step, whose arrays may be wrong."""
        self._classes.clear()

    # -- figures ---------------------------------------------------------------------------------

    def capacity_for(self, tokens: int) -> int:
        """The class of a row of `tokens`: a power of two, or the longest length if that is less.

        Raises:
            ValueError: the row is longer than the longest length.
        """
        if tokens > self.max_length:
            raise ValueError(f"a row of {tokens} tokens passes the longest length {self.max_length}")
        return min(max(MIN_CAPACITY, 1 << (tokens - 1).bit_length()), max(self.max_length, MIN_CAPACITY))

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
    def budget_bytes(self) -> int:
        return self.budget_tokens * self.layout.bytes_per_token

    def slabs(self) -> list[Slab]:
        return [slab for capacity in sorted(self._classes) for slab in self._classes[capacity]]

    def rows(self) -> list[KVRow]:
        """Live rows in pool order, in which decode steps batch them: slab by slab, place by place."""
        return [row for slab in self.slabs() for row in slab.places if row is not None]

    def check_integrity(self) -> None:
        """Raises AssertionError if slabs, rows and the budget disagree."""
        for capacity, slabs in self._classes.items():
            for slab in slabs:
                assert slab.capacity == capacity
                assert slab.used > 0, "an empty slab was not freed"
                for index, row in enumerate(slab.places):
                    assert row is None or (row.slab is slab and row.index == index and 0 <= row.length <= capacity)
        assert self.tokens_held <= self.budget_tokens, (self.tokens_held, self.budget_tokens)

    # -- slabs -----------------------------------------------------------------------------------

    def _slab_with_room(self, capacity: int) -> Slab | None:
        return next((s for s in self._classes.get(capacity, []) if s.free_index() is not None), None)

    def _add_slab(self, capacity: int, credit: int) -> Slab | None:
        held = self.tokens_held - credit
        reserved = -(-self.bytes_reserved // self.layout.bytes_per_token)
        room = self.budget_tokens - held - (reserved if held else 0)
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
        """A new slab, or None if the device is out of memory for it.

        If no memory is held that could be freed later, the device's error is raised instead.
        """
        try:
            slab = Slab(self.layout, capacity, rows)
            mx.eval(slab.arrays())  # so that an error is raised here and not in the next forward pass
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
        """Moves a row into a slab with a free place. Returns False, and raises, as `_fill` does."""
        place = _occupy(slab)
        if not self._fill(place, row, row.length):
            return False
        self._free_place(row.slab, row.index)
        slab.places[place.index] = row
        row.slab, row.index = slab, place.index
        return True

    def _fill(self, row: KVRow, source: KVRow, length: int) -> bool:
        """Copies the first `length` tokens of `source` into a new row, or frees the new row if that fails.

        Returns False if the device is out of memory and other rows will free some. Raises the device's other errors.
        """
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

    def _free_place(self, slab: Slab, index: int) -> None:
        slab.places[index] = None
        if slab.used == 0:
            self._classes[slab.capacity].remove(slab)
            if not self._classes[slab.capacity]:
                del self._classes[slab.capacity]


def _occupy(slab: Slab) -> KVRow:
    index = slab.free_index()
    assert index is not None
    return slab.occupy(index)


def _copy(source: Slab, source_index: int, target: Slab, target_index: int, length: int) -> None:
    """Copies the first `length` tokens of one row.

    The copies are evaluated before the writes start. Otherwise a pending view of an array would make the next write to
    it copy the whole slab instead of updating it in place.
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
