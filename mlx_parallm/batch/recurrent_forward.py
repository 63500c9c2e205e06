"""A forward pass in recurrent layers.

spans       row a: 1 token   row b: 1 token   row c: 5 tokens       single tokens come first
parts       [ a, b ] x 1 token                [ c ] x 5 tokens      one call of the mixer for each
states      of the rows before the pass are read from their places, and those after it are put there. If a row has
            reserved a checkpoint for the end of its part, the state is put there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.forward import Span
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS
from mlx_parallm.batch.kv.groups import KVRow, StateGroup
from mlx_parallm.batch.kv.state_arena import StateArena, StateBatch
from mlx_parallm.model.recurrent import Mixer, RowStates, arrays_of, states_of_rows


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows with equally many new tokens, which lie at [start, stop) of the pass.

    before: their states before the pass; None if none of them has any tokens
    after: their states after it, which get their layers one by one
    checkpoints: states of single rows of `after`, by the number of the row
    """

    start: int
    stop: int
    before: StateBatch | None
    after: StateBatch
    checkpoints: dict[int, StateBatch]


class RecurrentForward:
    """One forward pass in the recurrent layers of a model, which run in order.

    Args:
        spans: `in_order`.
        bank: the adapter bank that the mixers' linears read.
    """

    def __init__(self, group: StateGroup, spans: Sequence[Span[KVRow]], bank: AdapterBank) -> None:
        self._arena = arena = group.arena
        self._bank = bank
        arena.begin_pass()
        old = arena.batches(map(_place_before, spans))
        self._parts = list(_parts(arena, spans))
        for batch in old:
            arena.cut_up(batch, group.places.is_free)

    def run(self, layer: int, mixer: Mixer, x: mx.array) -> mx.array:
        """Inputs of all tokens [N, 1, in] → outputs [N, 1, out]. `layer`: its number among the recurrent ones."""
        return mx.concatenate([self._run(part, layer, mixer, x) for part in self._parts])

    def _run(self, part: _Part, layer: int, mixer: Mixer, x: mx.array) -> mx.array:
        states = states_of_rows(None if part.before is None else part.before.layers[layer])
        with self._bank.using_part(part.start, part.stop):
            output = mixer(x[part.start : part.stop].reshape(part.after.rows, -1, x.shape[-1]), states)
        dtypes = self._arena.specs[layer].dtypes
        after = [mx.contiguous(a.astype(dtype)) for a, dtype in zip(arrays_of(states), dtypes, strict=True)]
        part.after.layers.append(after)
        self._arena.add(after)
        for row, checkpoint in part.checkpoints.items():
            checkpoint.layers.append([mx.contiguous(array[row : row + 1]) for array in after])
            self._arena.add(checkpoint.layers[-1])
        return output.reshape(part.stop - part.start, 1, -1)


class StateCache(RowStates):
    """The cache object of one recurrent layer for one forward pass. `layer`: its number among the recurrent ones."""

    def __init__(self, forward: RecurrentForward, layer: int) -> None:
        self._forward = forward
        self._layer = layer

    def make_mask(self, _tokens: int) -> None:
        """Returns None: there is no padding."""

    def run(self, mixer: Mixer, x: mx.array) -> mx.array:
        """See `RowStates.run`."""
        return self._forward.run(self._layer, mixer, x)


def _place_before(span: Span[KVRow]) -> int | None:
    """The place of the row's state before its span; None if it has no tokens yet, and the place has another row's."""
    return span.row.state if span.start else None


def _parts(arena: StateArena, spans: Sequence[Span[KVRow]]) -> Iterator[_Part]:
    """All single tokens, and then each longer span alone."""
    start = 0
    for _, group in groupby(enumerate(spans), key=lambda item: -1 if item[1].tokens == 1 else item[0]):
        part = [span for _, span in group]
        stop = start + sum(span.tokens for span in part)
        yield _part(arena, part, start, stop)
        start = stop


def _part(arena: StateArena, spans: Sequence[Span[KVRow]], start: int, stop: int) -> _Part:
    before, after = arena.read([_place_before(span) for span in spans]), StateBatch(len(spans), [])
    arena.write([span.row.state for span in spans], after)
    checkpoints = {}
    for row, span in enumerate(spans):
        block, rest = divmod(span.stop, BLOCK_TOKENS)
        if not rest and (place := span.row.checkpoints.get(block)) is not None:
            checkpoints[row] = StateBatch(1, [])
            arena.write([place], checkpoints[row])
    return _Part(start, stop, before, after, checkpoints)
