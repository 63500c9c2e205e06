"""Divides the rows of one work class between API keys, and those of a key between its adapters, by their tokens.

It is a form of deficit round robin: of the owners that wait, the one for which the fewest tokens were computed gets the
next row. Deficit round robin itself would have to know the length of an answer before the row is given. Here tokens
count when they are computed, and a row counts as `ROW_TOKENS` in advance as long as it is held, so that one key cannot
take all rows before its first token is counted.

A key that comes while another one holds all rows need not wait for its answers to end: rows are taken back until both
hold as many.

An unused share is not saved up: an owner that begins to wait starts with the count of the owner with the fewest tokens
among those that wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import TypeVar

from mlx_parallm.core import WorkClass
from mlx_parallm.engine.sequence import Sequence

T = TypeVar("T")
Owner = tuple[WorkClass | str, ...]
"""A work class; a work class and a key; or both and the name of an adapter."""

ROW_TOKENS = 64
"""Tokens that a row counts as while it is held, in addition to those that were computed for it."""
AHEAD_TOKENS = 4 * ROW_TOKENS
"""How far ahead a key must be before rows are taken from it for one that holds some. Each row that changes hands makes
the difference smaller by twice `ROW_TOKENS`."""
_MOST_COUNTS = 4096
"""With more counts than this, those of owners that hold no row are forgotten."""


def owners(sequence: Sequence) -> tuple[Owner, Owner, Owner]:
    """The owners of a sequence, from its class to its adapter."""
    key, adapter = (sequence.work_class, sequence.key), sequence.adapter.name
    return key[:1], key, (*key, adapter)


class TokenShares:
    """Counts the tokens and the rows of every owner. Device thread only.

    `rows`: those that each owner holds. Invariant: a class has as many as its keys together, and a key as many as its
    adapters.
    """

    def __init__(self) -> None:
        self.rows: Counter[Owner] = Counter()
        self._tokens: dict[Owner, int] = {}
        self._least: dict[Owner, int] = {}  # what the one behind had got when those below an owner last waited

    def hold(self, sequence: Sequence) -> None:
        """Counts a row that the sequence has got."""
        for owner in owners(sequence):
            self.rows[owner] += 1

    def release(self, sequence: Sequence) -> None:
        """Counts a row that the sequence has given back."""
        for owner in owners(sequence):
            self.rows[owner] -= 1
            if not self.rows[owner]:
                del self.rows[owner]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Counts tokens that are computed for the sequence."""
        for owner in owners(sequence)[1:]:
            self._tokens[owner] = self.tokens(owner) + tokens
        if len(self._tokens) > _MOST_COUNTS:
            self._tokens = {owner: got for owner, got in self._tokens.items() if owner in self.rows}
            self._least = {owner: got for owner, got in self._least.items() if owner in self.rows}

    def tokens(self, owner: Owner) -> int:
        """What an owner counts as having got."""
        return self._tokens.get(owner, 0)

    def behind(self, waiting: Items[T], owner: Callable[[T], Owner]) -> list[T]:
        """Those of the `waiting` whose owner has got the least. All owners are of one kind, and below one other."""
        own = list(map(owner, waiting))
        above = own[0][:-1]
        for each in own:
            self._tokens[each] = max(self.tokens(each), self._least.get(above, 0))
        self._least[above] = min(map(self.tokens, own))
        standing = {each: self._standing(each) for each in own}
        least = min(standing.values())
        return [each for each, owned in zip(waiting, own, strict=True) if standing[owned] == least]

    def _standing(self, owner: Owner) -> int:
        """The tokens of an owner, and those that its rows count as."""
        return self.tokens(owner) + ROW_TOKENS * self.rows[owner]

    def reset(self) -> None:
        """Forgets all tokens. Call it when nothing waits and no row is held."""
        self._tokens.clear()
        self._least.clear()

    def row_to_yield(self, rows: Items[Sequence], to: Sequence, rows_are_short: bool) -> Sequence | None:
        """The row that gives way to a waiting sequence: the youngest one of the key that holds the most, if these are
        at least two more than the waiting sequence's key holds.

        A key without a row gets its first one so in any case. It gets more only from a key that is ahead by
        `AHEAD_TOKENS`, so that keys which hold about their share wait for answers to end. A row that gave way keeps its
        next place until it has drawn `ROW_TOKENS` more.

        Args:
            rows: all rows, in order of admission. Those of another class, or of a better priority, do not give way.
            rows_are_short: the sequence waits for a row, and not for memory.
        """
        own = self.rows[to.work_class, to.key]
        if own and not rows_are_short:
            return None
        rows = [row for row in rows if row.work_class is to.work_class and row.priority >= to.priority]
        held = Counter(row.key for row in rows)
        most = max(held.values(), default=0)
        if most - own < 2:
            return None
        youngest_first = (row for row in reversed(rows) if held[row.key] == most)
        if own == 0:
            return next(youngest_first)
        behind = self._standing((to.work_class, to.key)) + AHEAD_TOKENS
        ahead = (row for row in youngest_first if self._standing((row.work_class, row.key)) >= behind)
        return next((row for row in ahead if row.drawn >= row.keeps_row_until), None)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raises AssertionError if the rows that are counted are not those of the sequences that hold one."""
        assert self.rows == Counter(owner for sequence in live for owner in owners(sequence))
