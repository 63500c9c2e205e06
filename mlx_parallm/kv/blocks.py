"""The allocator of blocks: which are free, how many rows read each one, and which hold a cached prefix.

    used      one or more rows have the block in their tables; it may hold a cached prefix as well
    cached    no row has it, and it holds a cached prefix, so it can be evicted
    free      neither

A block id is a number below `total`. This module knows nothing of arrays.
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
"""How many runs of free blocks are tried for one that holds a whole request."""

N = TypeVar("N", bound=Hashable)
"""A node of the prefix index."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class FreeRuns:
    """A set of block ids, stored as sorted runs. Adding and removing take O(log runs) comparisons."""

    def __init__(self) -> None:
        self.count = 0
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}

    def add(self, start: int, length: int = 1) -> None:
        """Adds the ids [start, start + length), none of which is in the set."""
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
        """Removes the ids [start, start + length), all of which are in the set and so in one run."""
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
        """How many ids from `start` on are in the set without a gap."""
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
        """The `count` lowest ids."""
        ids: list[int] = []
        for start in self._starts:
            ids.extend(range(start, start + min(self._lengths[start], count - len(ids))))
            if len(ids) == count:
                break
        return ids

    def ids(self) -> set[int]:
        """All ids. For checks."""
        return {id for start in self._starts for id in range(start, start + self._lengths[start])}


class BlockAllocator(Generic[N]):
    """The blocks of one arena.

    Attributes:
        references: for each block, how many rows have it.
        cached_by: the node of the prefix index that a block is cached for, for those that are.
        evictable: the nodes of cached blocks that no row has, and their block ids, in the order in which rows released
            them.
    """

    def __init__(self) -> None:
        self.references: list[int] = []
        self.cached_by: dict[int, N] = {}
        self.evictable: dict[N, int] = {}
        self._runs = FreeRuns()

    @property
    def total(self) -> int:
        return len(self.references)

    @property
    def free(self) -> int:
        return self._runs.count

    @property
    def cached(self) -> int:
        return len(self.evictable)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    def is_free(self, block_id: int) -> bool:
        return not self.references[block_id] and block_id not in self.cached_by

    def is_private(self, block_id: int) -> bool:
        """Whether one row has the block and it is not cached. Only such a block may be written."""
        return self.references[block_id] == 1 and block_id not in self.cached_by

    # -- rows ------------------------------------------------------------------------------------

    def allocate(self, count: int, after: int = FREED) -> list[int]:
        """Allocates `count` free blocks for one row, consecutive ones if possible.

        They follow `after`, the row's last block, as far as those blocks are free. The others are a run that holds
        them all, or else the lowest free blocks.
        """
        assert count <= self.free, (count, self.free)
        allocated: list[int] = []
        if after != FREED:
            self._take_run(after + 1, min(count, self._runs.consecutive(after + 1)), allocated)
        if len(allocated) < count and (start := self._runs.find(count - len(allocated))) is not None:
            self._take_run(start, count - len(allocated), allocated)
        while len(allocated) < count:
            start, length = self._runs.lowest()
            self._take_run(start, min(length, count - len(allocated)), allocated)
        return allocated

    def _take_run(self, start: int, length: int, allocated: list[int]) -> None:
        if length:
            self._runs.remove(start, length)
            allocated.extend(range(start, start + length))
            self.references[start : start + length] = [1] * length

    def acquire(self, block_id: int) -> None:
        """Counts one more row that has the block, which is used or cached."""
        if not self.references[block_id]:
            del self.evictable[self.cached_by[block_id]]
        self.references[block_id] += 1

    def release(self, block_id: int) -> None:
        """Counts one row less. Without rows, the block can be evicted if it is cached, and is free otherwise."""
        assert self.references[block_id] > 0, block_id
        self.references[block_id] -= 1
        if not self.references[block_id]:
            if (node := self.cached_by.get(block_id)) is not None:
                self.evictable[node] = block_id
            else:
                self._runs.add(block_id)

    # -- cached prefixes -------------------------------------------------------------------------

    def cache(self, block_id: int, node: N) -> None:
        """Caches a used block, which is not cached yet, for `node`."""
        assert self.references[block_id] > 0, block_id
        assert block_id not in self.cached_by, block_id
        self.cached_by[block_id] = node

    def uncache(self, block_id: int) -> None:
        """Caches a block no longer. It becomes free if no row has it."""
        node = self.cached_by.pop(block_id)
        if not self.references[block_id]:
            del self.evictable[node]
            self._runs.add(block_id)

    # -- size ------------------------------------------------------------------------------------

    def resize(self, total: int) -> None:
        """Adds free blocks at the end, or removes blocks from the end that are all free."""
        if total > self.total:
            self._runs.add(self.total, total - self.total)
            self.references.extend([0] * (total - self.total))
        elif total < self.total:
            self._runs.remove(total, self.total - total)
            del self.references[total:]

    def moves_below(self, total: int, most: int) -> list[tuple[int, int]]:
        """Up to `most` moves (source, target) that bring blocks from ids at or above `total` to free ones below.

        Both are in ascending order, so that consecutive blocks stay consecutive where the targets are.
        """
        sources = [*islice((id for id in range(total, self.total) if not self.is_free(id)), most)]
        targets = [id for id in self._runs.first(len(sources)) if id < total]
        return list(zip(sources, targets, strict=False))

    def move(self, source: int, target: int) -> None:
        """Gives the rows and the node of `source` the free block `target`; `source` becomes free."""
        self._runs.remove(target)
        self._runs.add(source)
        self.references[target], self.references[source] = self.references[source], 0
        if (node := self.cached_by.pop(source, None)) is not None:
            self.cached_by[target] = node
            if node in self.evictable:
                self.evictable[node] = target

    def check_integrity(self) -> None:
        """Raises AssertionError if the states of the blocks disagree."""
        free = {id for id in range(self.total) if self.is_free(id)}
        assert free == self._runs.ids()
        assert len(free) == self.free
        cached = {id: node for id, node in self.cached_by.items() if not self.references[id]}
        assert cached == {id: node for node, id in self.evictable.items()}
        assert all(count >= 0 for count in self.references)
