"""HiddenStates keeps the trunk's outputs of the last tokens, from which a prediction head makes drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_parallm.batch.spans import Span

if TYPE_CHECKING:
    from mlx_parallm.engine.sequence import Sequence

LONGEST = 512
"""Hidden states of one sequence that are kept at most, so that a head sees so many tokens before its first draft."""

_MOST = 4096
"""Those of all sequences together; those of the newest pass are kept in any case."""


@dataclass(slots=True)
class _Pass:
    """The states of one forward pass, [n, D], and for each row the positions that it computed and their first place."""

    states: mx.array
    spans: dict[Sequence, tuple[range, int]]


class HiddenStates:
    """The hidden states of the newest forward passes. Device thread only.

    A position may have been computed in several passes, because drafts before the last one were wrong. Then the newest
    pass counts.
    """

    def __init__(self) -> None:
        self._passes: deque[_Pass] = deque()
        self._rows: set[Sequence] = set()
        self._total = 0  # states that are kept

    def add(self, spans: Seq[Span[Sequence]], outputs: mx.array) -> None:
        """Adds the outputs [N, D] of a pass that is built. Of a prompt, only the end is kept."""
        kept: dict[Sequence, tuple[range, int]] = {}
        places: list[int] = []
        stop = 0
        for span in spans:
            start, stop = stop, stop + span.tokens
            first = max(span.start, span.row.length - LONGEST)
            if first < span.stop and span.row.pooling is None:
                kept[span.row] = range(first, span.stop), len(places)
                places += range(start + first - span.start, stop)
        if not kept:
            return
        states = outputs if len(places) == len(outputs) else outputs[mx.array(places)]
        self._passes.append(_Pass(states, kept))
        self._rows |= kept.keys()
        self._total += len(places)
        while len(self._passes) > 1 and (self._total > _MOST or len(self._passes) > LONGEST):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._total -= len(self._passes.popleft().states)

    def newest(self) -> list[mx.array]:
        """The array of the last pass, which is computed with it."""
        return [self._passes[-1].states] if self._passes else []

    def first(self, row: Sequence, start: int, stop: int) -> int:
        """The first position from which on all states up to `stop` are kept, from `start` on."""
        return min((positions.start for _, positions, _ in self._pieces(row, start, stop)), default=stop)

    def gather(self, wanted: Seq[tuple[Sequence, int, int]]) -> mx.array:
        """The states [n, D] of these rows from one position to another one, all of which are kept."""
        arrays: dict[int, tuple[mx.array, int]] = {}  # each with its place among all
        total = 0
        places: list[int] = []
        for row, start, stop in wanted:
            of_row: list[int] = []
            for states, positions, place in self._pieces(row, start, stop):
                if id(states) not in arrays:
                    arrays[id(states)] = states, total
                    total += len(states)
                begin = arrays[id(states)][1] + place
                of_row[:0] = range(begin, begin + len(positions))
            assert len(of_row) == stop - start
            places += of_row
        parts = [states for states, _ in arrays.values()]
        return (parts[0] if len(parts) == 1 else mx.concatenate(parts))[mx.array(places)]

    def _pieces(self, row: Sequence, start: int, stop: int) -> Iterator[tuple[mx.array, range, int]]:
        """The parts that make up the states before `stop`, the last one first, back to `start` or to where one is not
        kept: an array, the positions, and the place of the first of them."""
        for each in reversed(self._passes):
            if stop <= start:
                return
            positions, place = each.spans.get(row, (range(0), 0))
            if not positions:
                continue
            if positions.stop < stop:
                return
            first = max(positions.start, start)
            if first < stop:
                yield each.states, range(first, stop), place + first - positions.start
                stop = first

    def forget(self, live: Collection[Sequence]) -> None:
        """Forgets all rows but the live ones."""
        if ended := self._rows.difference(live):
            self._rows -= ended
            for each in self._passes:
                for row in ended & each.spans.keys():
                    del each.spans[row]
            while self._passes and not self._passes[0].spans:
                self._drop_oldest()

    def clear(self) -> None:
        """Forgets all rows."""
        self._passes.clear()
        self._rows.clear()
        self._total = 0

    @property
    def nbytes(self) -> int:
        return sum(each.states.nbytes for each in self._passes)
