"""Lays out the rows of a micro-batch: what several rows begin with is there once (see `core.branches`).

A group of samples is a branch with the prompt, and one bucket or a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.core.branches import Branch, Bucket

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
