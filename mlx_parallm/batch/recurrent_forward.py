"""A forward pass in recurrent layers.

spans       row a: 1 token   row b: 1 token   row c: 5 tokens       single tokens come first
parts       [ a, b ] x 1 token                [ c ] x 5 tokens      one call of the mixer for each
states      read from the rows' places, and written there again. A part that ends with a block for which a row has
            reserved a checkpoint writes the state there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.batch.forward import Span
from mlx_parallm.batch.kv.blocks import BLOCK_TOKENS
from mlx_parallm.batch.kv.groups import KVRow, StateGroup
from mlx_parallm.model.recurrent import Mixer, RowStates, arrays_of, states_of_rows


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows with equally many new tokens, which lie at [start, stop) of the pass.

    places: of the rows' states, int [rows]
    begins: whether a row has no tokens yet, so that its place holds the state of another one; bool [rows]
    targets: where the states after the part are written: `places`, and those of checkpoints. int [n]
    of_targets: the row of each of them; None if there are no checkpoints
    """

    start: int
    stop: int
    places: mx.array
    begins: mx.array
    targets: mx.array
    of_targets: mx.array | None

    @property
    def rows(self) -> int:
        return int(self.places.size)


class RecurrentForward:
    """One forward pass in the recurrent layers of a model.

    Args:
        spans: `in_order`.
        bank: the adapter bank that the mixers' linears read.
    """

    def __init__(self, group: StateGroup, spans: Sequence[Span[KVRow]], bank: AdapterBank) -> None:
        self._group = group
        self._bank = bank
        self._parts = list(_parts(spans))

    def run(self, layer: int, mixer: Mixer, x: mx.array) -> mx.array:
        """Inputs of all tokens [N, 1, in] → outputs [N, 1, out]. `layer`: its number among the recurrent ones."""
        return mx.concatenate([self._run(part, layer, mixer, x) for part in self._parts])

    def _run(self, part: _Part, layer: int, mixer: Mixer, x: mx.array) -> mx.array:
        arena = self._group.arena
        before = [_unless(part.begins, array) for array in arena.read(layer, part.places)]
        states = states_of_rows(before)
        with self._bank.using_part(part.start, part.stop):
            output = mixer(x[part.start : part.stop].reshape(part.rows, -1, x.shape[-1]), states)
        after = arrays_of(states)
        arena.write(layer, part.targets, after if part.of_targets is None else [a[part.of_targets] for a in after])
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


def _parts(spans: Sequence[Span[KVRow]]) -> Iterator[_Part]:
    """All single tokens, and then each longer span alone."""
    start = 0
    for _, group in groupby(enumerate(spans), key=lambda item: -1 if item[1].tokens == 1 else item[0]):
        part = [span for _, span in group]
        stop = start + sum(span.tokens for span in part)
        yield _part(part, start, stop)
        start = stop


def _part(spans: Sequence[Span[KVRow]], start: int, stop: int) -> _Part:
    places = [span.row.state for span in spans]
    kept = [(row, place) for row, span in enumerate(spans) for place in _checkpoint(span)]
    return _Part(
        start,
        stop,
        mx.array(places),
        mx.array(np.array([span.start == 0 for span in spans])),
        mx.array([*places, *(place for _, place in kept)]),
        mx.array([*range(len(spans)), *(row for row, _ in kept)]) if kept else None,
    )


def _checkpoint(span: Span[KVRow]) -> Iterator[int]:
    """The place of the checkpoint that the row has reserved for the end of its span, if it has."""
    block, rest = divmod(span.stop, BLOCK_TOKENS)
    if not rest and block in span.row.checkpoints:
        yield span.row.checkpoints[block]


def _unless(begins: mx.array, states: mx.array) -> mx.array:
    """The states [rows, ...], zeros for rows without tokens."""
    return mx.where(begins.reshape(-1, *([1] * (states.ndim - 1))), mx.zeros_like(states), states)
