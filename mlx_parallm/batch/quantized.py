"""A forward pass in a layer group whose full blocks are quantized.

    row         [ 64 quantized ][ 64 quantized ][ 12 in full ]      its blocks, the last one in its tail
    chunk       20 tokens more
    staged                                       [ 32 in full ]     the blocks that the pass writes, in full precision

    row         [ 64 quantized ][ 64 quantized ][ 50 in full ]
    chunk       20 tokens more
    staged                                       [ 64 in full ][ 6 in full ]
    after it    [ 64 quantized ][ 64 quantized ][ 64 quantized ][ 6 in full ]

A token attends to its own block in full precision, and to all blocks before it as they are quantized, even if a block
was filled in the same pass. So a token's keys and values do not depend on how its row was cut into chunks: a chunk
attends in pieces, one for each block that it writes.

Attention reads ordinary arrays, made for one layer at a time: the staged blocks, and then copies in full precision of
the quantized ones that the pass reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.attention import AttentionCalls, AttentionChoice
from mlx_parallm.batch.spans import SeenBlocks, Span
from mlx_parallm.kv.arena import Lines, lines_of
from mlx_parallm.kv.blocks import BLOCK_TOKENS, FREED, blocks_for
from mlx_parallm.kv.memory import LayerGroup
from mlx_parallm.kv.prefix import first_visible
from mlx_parallm.kv.quantized import pack, unpack
from mlx_parallm.kv.row import KVRow
from mlx_parallm.model.linears import LatentHeads


@dataclass(frozen=True, slots=True)
class _Piece:
    """The new tokens of a row in one block.

    table: the row's, in this layer group
    tail: the row's
    start, stop: positions of the tokens
    is_last: whether the row has no new tokens in later blocks
    """

    table: Sequence[int]
    tail: int
    start: int
    stop: int
    is_last: bool

    @property
    def block(self) -> int:
        return self.start // BLOCK_TOKENS

    @property
    def fills(self) -> bool:
        """Whether the block is full after the pass."""
        return self.stop % BLOCK_TOKENS == 0

    def read_blocks(self, window: int | None) -> range:
        """The quantized blocks that the tokens attend to."""
        return range(min(first_visible(self.start, window), self.block), self.block)


class QuantizedGroup:
    """The forward pass in one layer group: index arrays that its layers share. See `forward.GroupPass`."""

    def __init__(
        self,
        group: LayerGroup,
        tails: LayerGroup,
        tables: Sequence[Sequence[int]],
        spans: Sequence[Span[KVRow]],
        bits: int,
        attention: AttentionChoice,
    ) -> None:
        pieces = [
            piece
            for span, table in zip(spans, tables, strict=True)
            for piece in _pieces(span, table, tails.block_of(span.row))
        ]
        self._blocks, self._tails, self._bits = group.arena, tails.arena, bits
        self._in_tails = [tails.layers.index(layer) for layer in group.layers]
        self._tail_of = mx.array([piece.tail for piece in pieces])
        self._filled = _moves([(i, piece.table[piece.block]) for i, piece in enumerate(pieces) if piece.fills])
        crosses = len(pieces) > len(spans)
        self._kept = _moves([(i, piece.tail) for i, piece in enumerate(pieces) if piece.is_last]) if crosses else None
        self._targets = (
            np.repeat(
                np.arange(len(pieces)) if crosses else [piece.tail for piece in pieces],
                [piece.stop - piece.start for piece in pieces],
            ),
            np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces]) % BLOCK_TOKENS,
        )
        read = dict.fromkeys(piece.table[block] for piece in pieces for block in piece.read_blocks(group.window))
        self._read = mx.array(list(read)) if read else None
        at = dict(zip(read, count(len(pieces)), strict=False))
        rows = [_seen(piece, staged, at, group.window) for staged, piece in enumerate(pieces)]
        self._calls = AttentionCalls(rows, group.window, attention)
        self._lines: dict[int, Lines] = {}
        self._staged: dict[int, tuple[mx.array, mx.array]] = {}

    def write(self, index: int, keys: mx.array, values: mx.array) -> None:
        """Stages the new keys and values [N, kv_heads, 1, head_dim], quantizes full blocks, and keeps the others."""
        layer, blocks, tails = self._in_tails[index], self._blocks, self._tails
        self._staged[index] = (
            self._write(keys, blocks.keys, index, tails.keys, layer),
            self._write(values, blocks.values, index, tails.values, layer),
        )

    def attend(
        self, index: int, queries: mx.array, scale: float, sinks: mx.array | None, heads: LatentHeads | None
    ) -> mx.array:
        keys, values = self._staged.pop(index)
        keys, values = self._beside(keys, self._blocks.keys[index]), self._beside(values, self._blocks.values[index])
        return self._calls.attend(keys, values, queries, scale, sinks, heads)

    def _write(
        self, tokens: mx.array, blocks: list[mx.array], index: int, tails: list[mx.array], layer: int
    ) -> mx.array:
        """Returns the staged blocks [kv_heads, pieces, 64, head_dim]; nothing if the layer keeps nothing of these.

        If no row's tokens cross the end of a block, they are written into the tails, which are read afterwards.
        Otherwise the tails are read first, because they still hold the blocks that the tokens fill, and the write
        copies the array.
        """
        if not tokens.size:
            return tokens
        tail = tails[layer]
        if self._kept is None:
            tail[self._lines_for(tokens)] = tokens
            staged = tail[:, self._tail_of]
        else:
            staged = tail[:, self._tail_of]
            staged[self._lines_for(tokens)] = tokens
            staged_at, tail_ids = self._kept
            tail[:, tail_ids] = staged[:, staged_at]
        if self._filled is not None:
            staged_at, block_ids = self._filled
            blocks[index][:, block_ids] = pack(staged[:, staged_at], self._bits)
        return staged

    def _lines_for(self, tokens: mx.array) -> Lines:
        """Where new tokens [N, kv_heads, 1, head_dim] go in the tails, or in the staged blocks."""
        kv_heads = tokens.shape[1]
        if kv_heads not in self._lines:
            self._lines[kv_heads] = lines_of(*self._targets, kv_heads)
        return self._lines[kv_heads]

    def _beside(self, staged: mx.array, blocks: mx.array) -> mx.array:
        """The staged blocks and the quantized ones that the pass reads."""
        if self._read is None or not staged.size:
            return staged
        read = unpack(blocks[:, self._read], self._bits, staged.shape[-1], staged.dtype)
        return mx.concatenate([staged, read], axis=1)


def _pieces(span: Span[KVRow], table: Sequence[int], tail: int) -> list[_Piece]:
    """The new tokens of a row, cut at the ends of blocks."""
    last = blocks_for(span.stop) - 1
    return [
        _Piece(
            table,
            tail,
            max(span.start, block * BLOCK_TOKENS),
            min(span.stop, (block + 1) * BLOCK_TOKENS),
            block == last,
        )
        for block in range(span.start // BLOCK_TOKENS, last + 1)
    ]


def _seen(piece: _Piece, staged: int, at: dict[int, int], window: int | None) -> SeenBlocks:
    """The blocks that a piece attends to, by their indices in the arrays of one layer."""
    read = piece.read_blocks(window)
    indices = [*(at[piece.table[block]] for block in read), staged]
    return SeenBlocks(indices, read.start * BLOCK_TOKENS, piece.start, piece.stop - piece.start)


def _moves(pairs: Sequence[tuple[int, int]]) -> tuple[mx.array, mx.array] | None:
    """Sources and targets as index arrays; None if there are none."""
    if not pairs:
        return None
    assert all(target != FREED for _, target in pairs), "a row has no room for its tokens"
    sources, targets = zip(*pairs, strict=True)
    return mx.array(list(sources)), mx.array(list(targets))
