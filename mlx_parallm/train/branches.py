"""How the tokens of a pass with gradients lie: what several rows begin with is there once.

    branch    [ what all rows begin with ]
    buckets       [ the rest of row 0     ]
                  [ the rest of row 3   . ]        rows of about the same width, padded (.) to the widest
    branches      [ what rows 1 and 2 also share ]
                      [ the rest of row 1 ]
                      [ the rest of row 2 ]

They lie in this order, one after the other. If several turns are shared, or the beginnings of answers, there are
branches in branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
