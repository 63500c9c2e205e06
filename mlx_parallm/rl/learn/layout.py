"""How the tokens of a micro-batch lie: what several rows begin with is there once.

    branch    [ what all rows begin with ]
    buckets       [ the rest of row 0     ]
                  [ the rest of row 3   . ]        rows of about the same width, padded (.) to the widest
    branches      [ what rows 1 and 2 also share ]
                      [ the rest of row 1 ]
                      [ the rest of row 2 ]

They lie in this order, one after the other. A group of samples is a branch with the prompt, and one bucket or a few. If
several turns are shared, or the beginnings of answers, there are branches in branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

_PADDING = 8
"""Padding tokens that a bucket may have; it may have more, up to an eighth of its tokens. They cost less than another
attention call."""

_WORTH_A_BRANCH = 4
"""A branch must save at least so many tokens. It costs an attention call, and splits buckets."""


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one row, int32 [T]. `key`: rows are in the order of their tokens if they are in that of their keys,
    which are compared faster."""

    ids: NDArray[np.int32]
    key: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> Row:
        array = np.array(ids, np.int32)
        return cls(array, array.astype(">i4").tobytes())


@dataclass(frozen=True, slots=True)
class Bucket:
    """The rests of `rows` rows, each right-padded to `width` tokens. `padding`: padding tokens of all rows."""

    rows: int
    width: int
    padding: int

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
        return self.rows * self.width

    def with_row(self, width: int) -> Bucket:
        """This bucket with another row of `width` tokens."""
        used, widest = self.tokens - self.padding + width, max(self.width, width)
        return Bucket(self.rows + 1, widest, (self.rows + 1) * widest - used)


@dataclass(frozen=True, slots=True)
class Piece:
    """The positions [start, stop) of a row lie from index `at` of the micro-batch on."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Branch:
    """What several rows begin with after `start` tokens of the branches above it, and what follows it.

    length: its own tokens, at the positions [start, stop)
    buckets: the rows that nothing else is shared with
    branches: the others
    """

    start: int
    length: int
    buckets: tuple[Bucket, ...]
    branches: tuple[Branch, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def tokens(self) -> int:
        """All tokens, padding included."""
        return self.length + sum(bucket.tokens for bucket in self.buckets) + sum(each.tokens for each in self.branches)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, padding included."""
        buckets = max((bucket.width for bucket in self.buckets), default=0)
        return max(self.stop + buckets, *(branch.longest for branch in self.branches), 0)

    def positions(self) -> Iterator[int]:
        """The position of each token in its own row."""
        yield from range(self.start, self.stop)
        for bucket in self.buckets:
            for _ in range(bucket.rows):
                yield from range(self.stop, self.stop + bucket.width)
        for branch in self.branches:
            yield from branch.positions()

    def rows(self, at: int = 0, above: tuple[Piece, ...] = ()) -> Iterator[tuple[Piece, ...]]:
        """Where the tokens of each row lie, row after row."""
        path = (*above, Piece(self.start, self.stop, at))
        at += self.length
        for bucket in self.buckets:
            for _ in range(bucket.rows):
                yield (*path, Piece(self.stop, self.stop + bucket.width, at))
                at += bucket.width
        for branch in self.branches:
            yield from branch.rows(at, path)
            at += branch.tokens


@dataclass(frozen=True, slots=True)
class Layout:
    """`order`: the indices of the rows that were laid out, in the order in which they lie."""

    branch: Branch
    order: tuple[int, ...]


def laid_out(rows: Sequence[Row]) -> Layout:
    """The layout of these rows, which does not depend on their order. What all of them share is always a branch."""
    ids = [row.ids for row in rows]
    branch, order = _branch(ids, sorted(range(len(rows)), key=lambda row: rows[row].key), 0)
    return Layout(branch, tuple(order))


def _branch(rows: Sequence[NDArray[np.int32]], members: list[int], start: int) -> tuple[Branch, list[int]]:
    """The branch of these rows, sorted by their tokens, which share `start` tokens or more with each other."""
    stop = _common(rows, members)
    alone: list[int] = []
    shared: list[list[int]] = []
    for part in _parts(rows, members, stop, stop):
        if len(part) == 1:
            alone += part
        else:
            shared.append(part)
    alone.sort(key=lambda row: len(rows[row]))
    branches = [_branch(rows, part, stop) for part in shared]
    order = alone + [row for _, inner in branches for row in inner]
    buckets = _buckets(len(rows[row]) - stop for row in alone)
    return Branch(start, stop - start, buckets, tuple(branch for branch, _ in branches)), order


def _parts(rows: Sequence[NDArray[np.int32]], members: list[int], stop: int, at: int) -> Iterator[list[int]]:
    """Splits rows that agree below `at` into those that get a branch of their own from `stop` on, and single ones."""
    for ended, part in groupby(members, lambda row: None if len(rows[row]) == at else int(rows[row][at])):
        same = list(part)
        common = _common(rows, same)
        if len(same) == 1 or ended is None:
            yield from ([row] for row in same)
        elif (common - stop) * (len(same) - 1) >= _WORTH_A_BRANCH:
            yield same
        else:
            yield from _parts(rows, same, stop, common)


def _common(rows: Sequence[NDArray[np.int32]], members: Sequence[int]) -> int:
    """How many tokens sorted rows begin with in common: as many as the first and the last of them."""
    first, last = rows[members[0]], rows[members[-1]]
    length = min(len(first), len(last))
    differ = np.flatnonzero(first[:length] != last[:length])
    return int(differ[0]) if differ.size else length


def _buckets(widths: Iterator[int]) -> tuple[Bucket, ...]:
    """The buckets of rows in ascending order of their widths."""
    buckets: list[Bucket] = []
    for width in widths:
        joined = buckets[-1].with_row(width) if buckets else None
        if joined is not None and joined.padding <= max(_PADDING, joined.tokens // 8):
            buckets[-1] = joined
        else:
            buckets.append(Bucket(1, width, 0))
    return tuple(buckets)
