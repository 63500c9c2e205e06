"""A forward pass in recurrent layers.

spans       row a: 1 token   row b: 1 token   row c: 5 tokens       single tokens come first
parts       [ a, b ] x 1 token                [ c ] x 5 tokens      one call of the mixer for each
states      of the rows before the pass are read from their places, and those after it are put there. If a row has
            reserved a checkpoint for the end of its part, the state is put there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.forward import Span
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS
from mlx_parallm.batch.kv.groups import KVRow, StateGroup
from mlx_parallm.batch.kv.state_arena import StateArena, StateBatch
from mlx_parallm.model.recurrent import Mixer, Part, RowStates


class _Part(Part):
    """Rows of the pass with their states.

    before: their states before the pass; None if none of them has any tokens
    after: their states after it, which get their layers when the pass is built
    checkpoints: states of single rows of `after`, by the number of the row
    """

    def __init__(self, arena: StateArena, spans: Sequence[Span[KVRow]], start: int, tokens: int) -> None:
        super().__init__(start, start + sum(span.tokens for span in spans), len(spans), tokens)
        self.before = arena.read([_place_before(span) for span in spans])
        self.after, self.checkpoints = StateBatch(len(spans), []), dict[int, StateBatch]()
        self._arena, self._caches = arena, dict[int, ArraysCache]()
        arena.write([span.row.state for span in spans], self.after)
        for row, span in enumerate(spans):
            block, rest = divmod(span.stop, BLOCK_TOKENS)
            if not rest and (place := span.row.checkpoints.get(block)) is not None:
                self.checkpoints[row] = StateBatch(1, [])
                arena.write([place], self.checkpoints[row])

    def states(self, layer: int) -> ArraysCache:
        """The states of a layer, which the mixers that use it read and set."""
        if layer not in self._caches:
            states = self._caches[layer] = ArraysCache(len(self._arena.specs[layer].shapes))
            for index, array in enumerate(self.before.layers[layer] if self.before is not None else ()):
                states[index] = array
        return self._caches[layer]

    def finish(self) -> None:
        """Keeps the states after the pass, of all layers."""
        for layer, spec in enumerate(self._arena.specs):
            arrays = zip(self.states(layer).cache, spec.dtypes, strict=True)
            after = [mx.contiguous(array.astype(dtype)) for array, dtype in arrays]
            self.after.layers.append(after)
            self._arena.add(after)
            for row, checkpoint in self.checkpoints.items():
                checkpoint.layers.append([mx.contiguous(array[row : row + 1]) for array in after])
                self._arena.add(checkpoint.layers[-1])


class RecurrentForward:
    """One forward pass in the recurrent layers of a model.

    Args:
        spans: `in_order`.
        bank: the adapter bank that the mixers' linears read.
    """

    def __init__(self, group: StateGroup, spans: Sequence[Span[KVRow]], bank: AdapterBank) -> None:
        self._bank = bank
        group.arena.begin_pass()
        old = group.arena.batches(map(_place_before, spans))
        self._parts = list(_parts(group.arena, spans))
        for batch in old:
            group.arena.cut_up(batch, group.places.is_free)

    def run(self, layer: int, mixer: Mixer) -> Iterator[Any]:
        """See `RowStates.run`. `layer`: its number among the recurrent ones."""
        for part in self._parts:
            with self._bank.using_part(part.start, part.stop):
                yield mixer(part, part.states(layer))

    def finish(self) -> None:
        """Keeps the states after the pass. Call it when the pass is built."""
        for part in self._parts:
            part.finish()


class StateCache(RowStates):
    """The cache object of one recurrent layer for one forward pass. `layer`: its number among the recurrent ones."""

    def __init__(self, forward: RecurrentForward, layer: int, offset: mx.array) -> None:
        self._forward = forward
        self._layer = layer
        self.offset = offset

    def make_mask(self, _tokens: int) -> None:
        """Returns None: there is no padding."""

    def run(self, mixer: Mixer) -> Iterator[Any]:
        """See `RowStates.run`."""
        return self._forward.run(self._layer, mixer)


def _place_before(span: Span[KVRow]) -> int | None:
    """The place of the row's state before its span; None if it has no tokens yet, and the place has another row's."""
    return span.row.state if span.start else None


def _parts(arena: StateArena, spans: Sequence[Span[KVRow]]) -> Iterator[_Part]:
    """All single tokens of rows that have tokens already, and then each other span alone: a new row has no state, and
    mlx-lm's code begins with one of its own."""
    start, tokens = 0, sum(span.tokens for span in spans)
    for _, group in groupby(enumerate(spans), key=_kind):
        part = _Part(arena, [span for _, span in group], start, tokens)
        yield part
        start = part.stop


def _kind(item: tuple[int, Span[KVRow]]) -> int:
    number, span = item
    if span.tokens > 1:
        return number
    return -1 if span.start else -2
