"""Which tokens of a forward pass are multiplied together with which blocks. Host arrays only.

A fold is a set of tokens that attend to the same blocks: the tokens of one chunk, or single tokens of several rows that
share a prompt. Its queries become the rows of one product, so a block is read once for all of them:

    row 0   [ 4 ][ 6 ][ 1 ]      rows share 4 and 6:   fold (0, 1) with blocks 4, 6
    row 1   [ 4 ][ 6 ][ 3 ]                            fold (0) with block 1, fold (1) with block 3
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS

_WORTH_FOLDING = 32
"""A fold of several rows must save the reading of at least so many blocks, because it takes kernels of its own."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The tokens of one row in a forward pass, and the blocks that they attend to.

    places: the blocks, in the row's order
    first: the position of the first token in these blocks
    start: the position of the row's first new token. A token sees the positions up to its own.
    tokens: the number of new tokens
    """

    places: Sequence[int]
    first: int
    start: int
    tokens: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class Folds:
    """Folds of equally many tokens, with pairs of a fold and one of its blocks.

    tokens: [folds, width], the indices of each fold's tokens in the pass; shorter folds repeat one of their own
    fold, place, block: [pairs], the fold of each pair, the place of its block, and the block's number in its sequence
    """

    tokens: Indices
    fold: Indices
    place: Indices
    block: Indices

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def pairs(self) -> int:
        return len(self.fold)


def folds_of(rows: Sequence[RowBlocks], sharing: bool = True) -> list[Folds]:
    """The folds of all rows. The first of them have every token once; others share blocks between rows, if `sharing`
    is allowed and pays."""
    counts = np.array([len(row.places) for row in rows])
    fold = np.repeat(np.arange(len(rows)), counts)
    place = np.concatenate([np.asarray(row.places, np.int64) for row in rows])
    first = np.array([row.first // BLOCK_TOKENS for row in rows])
    block = np.arange(len(fold)) - np.repeat(np.cumsum(counts) - counts, counts) + first[fold]
    own = Folds(_tokens(rows), fold, place, block)
    if own.width > 1 or not sharing:
        return [own]
    last = np.cumsum(counts) - 1
    shared = list(_shared(own, last))
    if not shared:
        return [own]
    left = ~np.isin(place, np.concatenate([folds.place for folds in shared]))
    left[last] = True
    return [Folds(own.tokens, fold[left], place[left], block[left]), *shared]


def _tokens(rows: Sequence[RowBlocks]) -> Indices:
    """The tokens of each row, [rows, most tokens of one]. Shorter rows repeat their first one."""
    counts = np.array([row.tokens for row in rows])
    first, offsets = np.cumsum(counts) - counts, np.arange(counts.max())
    tokens: Indices = first[:, None] + np.where(offsets < counts[:, None], offsets, 0)
    return tokens


def _shared(own: Folds, last: Indices) -> Iterator[Folds]:
    """Folds of single tokens that share blocks, where it pays; each with another number of sharers.

    A row's last block is not shared, because it is being written.
    """
    readers = np.bincount(own.place)
    if readers.max() == 1:
        return
    rows_of_block: dict[tuple[int, int], list[int]] = defaultdict(list)
    candidates = np.setdiff1d(np.flatnonzero(readers[own.place] > 1), last)
    for fold, block, place in zip(
        *(each[candidates].tolist() for each in (own.fold, own.block, own.place)), strict=True
    ):
        rows_of_block[block, place].append(fold)
    runs: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for key, sharers in rows_of_block.items():
        runs[tuple(sharers)].append(key)
    by_width: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for sharing, blocks in runs.items():
        if (len(sharing) - 1) * len(blocks) >= _WORTH_FOLDING:
            by_width[len(sharing)].append(sharing)
    for folds in by_width.values():
        fold = np.repeat(np.arange(len(folds)), [len(runs[sharing]) for sharing in folds])
        pairs = np.array([pair for sharing in folds for pair in runs[sharing]])
        yield Folds(np.array(folds), fold, pairs[:, 1], pairs[:, 0])
