"""What a forward pass computes: the next tokens of each sequence, and the blocks that they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.kv.blocks import BLOCK_TOKENS, blocks_for
from mlx_parallm.kv.prefix import first_visible
from mlx_parallm.kv.row import KVRow

R = TypeVar("R", bound=KVRow)
R_co = TypeVar("R_co", bound=KVRow, covariant=True)

Indices = NDArray[np.int64]

SHORT_CHUNK = 64
"""Chunks of at most this many tokens are padded to the same length and share one attention call."""


class Kind(IntEnum):
    """The length of a span decides how it attends. The kinds are in the order in which a pass has them."""

    SINGLE = 1
    SHORT = 2
    LONG = 3


def kind_of(tokens: int) -> Kind:
    """The kind of a span with so many new tokens."""
    if tokens == 1:
        return Kind.SINGLE
    return Kind.SHORT if tokens <= SHORT_CHUNK else Kind.LONG


@dataclass(frozen=True, slots=True)
class Span(Generic[R_co]):
    """The next `tokens` tokens of a row, after the `start` tokens that are computed. The row has room for them."""

    row: R_co
    start: int
    tokens: int

    @property
    def stop(self) -> int:
        """The row's computed tokens after the forward pass."""
        return self.start + self.tokens


def in_order(spans: Sequence[Span[R]]) -> list[Span[R]]:
    """Single tokens first, then short chunks, then long ones; of each kind, those that attend to few tokens first."""
    return sorted(spans, key=lambda span: (kind_of(span.tokens), span.stop))


def positions_of(spans: Sequence[Span[KVRow]]) -> Indices:
    """The position of each new token in its sequence, [N]."""
    return np.array([at for span in spans for at in range(span.start, span.stop)])


@dataclass(frozen=True, slots=True)
class SeenBlocks:
    """The tokens of one sequence in a forward pass, and the blocks that they attend to.

    block_ids: the ids of the blocks, in the sequence's order
    first: the position of the first token in these blocks
    start: the position of the first new token. A token sees the positions up to its own.
    tokens: the number of new tokens
    """

    block_ids: Sequence[int]
    first: int
    start: int
    tokens: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.tokens


def seen_blocks(span: Span[KVRow], table: Sequence[int], window: int | None) -> SeenBlocks:
    """The blocks of a sequence that its span's tokens attend to."""
    first = first_visible(span.start, window)
    return SeenBlocks(table[first : blocks_for(span.stop)], first * BLOCK_TOKENS, span.start, span.tokens)


def write_targets(spans: Sequence[Span[KVRow]], tables: Sequence[Sequence[int]]) -> tuple[Indices, Indices]:
    """For each new token, the id of its block and its position in the block: both [N]."""
    each = [(table, at) for span, table in zip(spans, tables, strict=True) for at in range(span.start, span.stop)]
    return np.array([table[at // BLOCK_TOKENS] for table, at in each]), np.array([at % BLOCK_TOKENS for _, at in each])
