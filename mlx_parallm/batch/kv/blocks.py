"""Places of blocks in an arena: which are free, how many rows read each one, and which a cached prefix owns.

    used      one or more rows name the place in their tables; a cached prefix may own it as well
    cached    no row names it, and a cached prefix owns it
    free      neither

A place is a number below `total`. This module knows nothing of arrays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

BLOCK_TOKENS = 64
"""Tokens whose keys and values are stored in one block."""

FREED = -1
"""Stands in a table for a block that was given back because no later token can attend to it."""

_RUNS_TRIED = 32
"""How many runs of free places are tried for one that holds a whole request."""

OwnerT = TypeVar("OwnerT", bound=Hashable)


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class FreeRuns:
    """A set of places, stored as sorted runs of consecutive ones. Adding and removing take O(log runs) comparisons."""

    def __init__(self) -> None:
        self.count = 0
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}

    def add(self, start: int, length: int = 1) -> None:
        """Adds the places [start, start + length), none of which is in the set."""
        self.count += length
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + length:
            length += self._lengths.pop(self._starts.pop(at))
        before = self._starts[at - 1] if at else -1
        if at and before + self._lengths[before] == start:
            self._lengths[before] += length
        else:
            self._starts.insert(at, start)
            self._lengths[start] = length

    def remove(self, start: int, length: int = 1) -> None:
        """Removes the places [start, start + length), all of which are in the set and so in one run."""
        self.count -= length
        at = bisect_right(self._starts, start) - 1
        first = self._starts[at]
        before, after = start - first, first + self._lengths[first] - start - length
        assert before >= 0 <= after, (start, length)
        if before:
            self._lengths[first] = before
            at += 1
        else:
            del self._starts[at], self._lengths[first]
        if after:
            self._starts.insert(at, start + length)
            self._lengths[start + length] = after

    def consecutive(self, start: int) -> int:
        """How many places from `start` on are in the set without a gap."""
        at = bisect_right(self._starts, start) - 1
        return max(0, self._starts[at] + self._lengths[self._starts[at]] - start) if at >= 0 else 0

    def find(self, length: int) -> int | None:
        """The start of a run of at least `length`, among the lowest runs and the highest; None if all are shorter."""
        tried = (*islice(self._starts, _RUNS_TRIED), *self._starts[-1:])
        return next((start for start in tried if self._lengths[start] >= length), None)

    def lowest(self) -> tuple[int, int]:
        """Start and length of the lowest run."""
        return self._starts[0], self._lengths[self._starts[0]]

    def first(self, count: int) -> list[int]:
        """The `count` lowest places."""
        places: list[int] = []
        for start in self._starts:
            places.extend(range(start, start + min(self._lengths[start], count - len(places))))
            if len(places) == count:
                break
        return places

    def places(self) -> set[int]:
        """All places. For checks."""
        return {place for start in self._starts for place in range(start, start + self._lengths[start])}


class Places(Generic[OwnerT]):
    """The places of one arena.

    Attributes:
        references: for each place, how many rows name it.
        owners: the node of the prefix index that owns a place, for those that have one.
        idle: the owners of cached places and their places, in the order in which rows let go of them.
    """

    def __init__(self) -> None:
        self.references: list[int] = []
        self.owners: dict[int, OwnerT] = {}
        self.idle: dict[OwnerT, int] = {}
        self._runs = FreeRuns()

    @property
    def total(self) -> int:
        return len(self.references)

    @property
    def free(self) -> int:
        return self._runs.count

    @property
    def cached(self) -> int:
        return len(self.idle)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    def is_free(self, place: int) -> bool:
        return not self.references[place] and place not in self.owners

    def is_private(self, place: int) -> bool:
        """Whether one row names the place and no cached prefix owns it. Only such a block may be written."""
        return self.references[place] == 1 and place not in self.owners

    # -- rows ------------------------------------------------------------------------------------

    def take(self, count: int, after: int = FREED) -> list[int]:
        """Takes `count` free places for one row, consecutive ones if possible.

        They follow `after`, the row's last place, as far as those places are free. The others are a run that holds
        them all, or else the lowest free places.
        """
        assert count <= self.free, (count, self.free)
        taken: list[int] = []
        if after != FREED:
            self._take_run(after + 1, min(count, self._runs.consecutive(after + 1)), taken)
        if len(taken) < count and (start := self._runs.find(count - len(taken))) is not None:
            self._take_run(start, count - len(taken), taken)
        while len(taken) < count:
            start, length = self._runs.lowest()
            self._take_run(start, min(length, count - len(taken)), taken)
        return taken

    def _take_run(self, start: int, length: int, taken: list[int]) -> None:
        if length:
            self._runs.remove(start, length)
            taken.extend(range(start, start + length))
            self.references[start : start + length] = [1] * length

    def acquire(self, place: int) -> None:
        """Counts one more row that names the place, which is used or cached."""
        if not self.references[place]:
            del self.idle[self.owners[place]]
        self.references[place] += 1

    def release(self, place: int) -> None:
        """Counts one row less. Without rows, the place is cached if it has an owner, and free otherwise."""
        assert self.references[place] > 0, place
        self.references[place] -= 1
        if not self.references[place]:
            if (owner := self.owners.get(place)) is not None:
                self.idle[owner] = place
            else:
                self._runs.add(place)

    # -- cached prefixes -------------------------------------------------------------------------

    def own(self, place: int, owner: OwnerT) -> None:
        """Makes `owner` the owner of a used place that has none."""
        assert self.references[place] > 0, place
        assert place not in self.owners, place
        self.owners[place] = owner

    def disown(self, place: int) -> None:
        """Takes a place from its owner. It becomes free if no row names it."""
        owner = self.owners.pop(place)
        if not self.references[place]:
            del self.idle[owner]
            self._runs.add(place)

    # -- size ------------------------------------------------------------------------------------

    def resize(self, total: int) -> None:
        """Adds free places at the end, or removes places from the end that are all free."""
        if total > self.total:
            self._runs.add(self.total, total - self.total)
            self.references.extend([0] * (total - self.total))
        elif total < self.total:
            self._runs.remove(total, self.total - total)
            del self.references[total:]

    def moves_below(self, total: int, most: int) -> list[tuple[int, int]]:
        """Up to `most` moves (source, target) that bring blocks from places at or above `total` into free ones below.

        Both are in ascending order, so that consecutive blocks stay consecutive where the targets are.
        """
        sources = [*islice((p for p in range(total, self.total) if not self.is_free(p)), most)]
        targets = [place for place in self._runs.first(len(sources)) if place < total]
        return list(zip(sources, targets, strict=False))

    def move(self, source: int, target: int) -> None:
        """Gives the rows and the owner of `source` to the free place `target`; `source` becomes free."""
        self._runs.remove(target)
        self._runs.add(source)
        self.references[target], self.references[source] = self.references[source], 0
        if (owner := self.owners.pop(source, None)) is not None:
            self.owners[target] = owner
            if owner in self.idle:
                self.idle[owner] = target

    def check_integrity(self) -> None:
        """Raises AssertionError if the states of the places disagree."""
        free = {place for place in range(self.total) if self.is_free(place)}
        assert free == self._runs.places()
        assert len(free) == self.free
        cached = {p: o for p, o in self.owners.items() if not self.references[p]}
        assert cached == {place: owner for owner, place in self.idle.items()}
        assert all(count >= 0 for count in self.references)
