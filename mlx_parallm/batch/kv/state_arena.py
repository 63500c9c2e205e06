"""Places for states. A state is arrays of every recurrent layer, which are never written again, or else a copy of each
opaque cache, which no pass uses again.

So a place holds a reference, and to copy a state copies no array. The states after a forward pass over several rows are
one batch. If the next pass has the same rows, it takes the batch as it is; otherwise the batch is cut up.

    places      0    1    2    3         pass over rows 0, 1, 2: one batch, [3, ...] for each array
    hold        └────┴────┘    │
                batch          └ batch of one row, such as a checkpoint
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.kv.arena import Bytes
from mlx_parallm.model.layer_state import OpaqueSpec, RecurrentSpec


@dataclass(eq=False, slots=True)
class StateBatch:
    """The states of some rows. `layers`: for each recurrent layer its arrays, each [rows, ...]; for each opaque cache,
    that of the one row."""

    rows: int
    layers: list[list[Any]]

    def row(self, index: int) -> StateBatch:
        """The state of one row alone, which does not keep the others in memory once it is evaluated."""
        if self.rows == 1:
            return self
        return StateBatch(1, [[mx.contiguous(a[index : index + 1]) for a in arrays] for arrays in self.layers])


@dataclass(frozen=True, slots=True)
class _Held:
    """The state at `index` of a batch."""

    batch: StateBatch
    index: int


class StateArena:
    """The states of a model's recurrent layers or opaque caches, one in each place.

    Attributes:
        blocks, goal: the number of places.
    """

    def __init__(self, specs: Sequence[RecurrentSpec | OpaqueSpec]) -> None:
        self.specs = tuple(specs)
        self.blocks = self.goal = 0
        self._held: list[_Held | None] = []
        self._new: list[mx.array] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one state. Those by which opaque caches grow count as blocks of the row."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def array_bytes(self) -> int:
        """Bytes of all places. One that is free may hold a state until the next pass, or until it is taken away."""
        return self.blocks * self.block_bytes

    def resize(self, blocks: int, most_bytes: float = math.inf) -> bool:
        """Adds empty places at the end, or removes places from the end. Returns True: it is done at once."""
        del self._held[blocks:]
        self._held += [None] * (blocks - len(self._held))
        self.blocks = self.goal = blocks
        return True

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the states at `sources` to `targets`. No place may be in both."""
        for source, target in zip(sources, targets, strict=True):
            self._held[target] = self._held[source]

    def to_host(self, place: int) -> list[Bytes]:
        """Copies the state at a place to host memory: the bytes of each array of each layer."""
        held = self._held[place]
        assert held is not None, place
        arrays = [mx.flatten(array).view(mx.uint8) for layer in _sliced(held) for array in layer]
        mx.eval(arrays)
        return [np.asarray(array).copy() for array in arrays]

    def from_host(self, place: int, arrays: Sequence[Bytes]) -> None:
        """Lets a place hold a state, of arrays as `to_host` returns them."""
        given = iter(arrays)
        specs = (spec for spec in self.specs if isinstance(spec, RecurrentSpec))
        kinds = (zip(spec.shapes, spec.dtypes, strict=True) for spec in specs)
        layers = [[mx.array(next(given)).view(dtype).reshape(1, *shape) for shape, dtype in kind] for kind in kinds]
        mx.eval(layers)
        self.write([place], StateBatch(1, layers))

    def arrays(self) -> list[mx.array]:
        """The arrays that the last pass has made."""
        return self._new

    # -- one forward pass ------------------------------------------------------------------------

    def begin_pass(self, is_free: Callable[[int], bool]) -> None:
        """Call it before the states of a pass are read. Places that are free let go of what they hold."""
        self._new = []
        self._held = [None if is_free(place) else held for place, held in enumerate(self._held)]

    def read(self, places: Sequence[int | None]) -> StateBatch | None:
        """The states at these places, zeros for None. None if there are only zeros."""
        held = [None if place is None else self._held[place] for place in places]
        if not any(held):
            return None
        if (first := held[0]) is not None and held == [_Held(first.batch, i) for i in range(first.batch.rows)]:
            return first.batch
        rows = [_sliced(each) if each is not None else self._zeros() for each in held]
        return StateBatch(len(rows), [_joined(arrays) for arrays in zip(*rows, strict=True)])

    def write(self, places: Sequence[int], batch: StateBatch) -> None:
        """Lets these places hold the rows of a batch, in order. Its layers may be added later."""
        for index, place in enumerate(places):
            self._held[place] = _Held(batch, index)

    def add(self, arrays: Sequence[mx.array]) -> None:
        """Counts arrays among those that the pass has made."""
        self._new += arrays

    def batches(self, places: Iterable[int | None]) -> list[StateBatch]:
        """The batches of several rows that these places hold a row of."""
        held = (self._held[place] for place in places if place is not None)
        return list(dict.fromkeys(each.batch for each in held if each is not None and each.batch.rows > 1))

    def cut_up(self, batch: StateBatch) -> None:
        """Lets each place that holds a row of this batch hold that row alone, so that the batch can leave memory."""
        for place, held in enumerate(self._held):
            if held is not None and held.batch is batch:
                self._held[place] = _Held(self._alone(held), 0)

    def _alone(self, held: _Held) -> StateBatch:
        alone = held.batch.row(held.index)
        self._new += [array for arrays in alone.layers for array in arrays]
        return alone

    def _zeros(self) -> list[list[mx.array]]:
        return [
            [mx.zeros((1, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
            for spec in self.specs
            if isinstance(spec, RecurrentSpec)
        ]


def _sliced(held: _Held) -> list[list[mx.array]]:
    return [[array[held.index : held.index + 1] for array in arrays] for arrays in held.batch.layers]


def _joined(rows: Sequence[list[mx.array]]) -> list[mx.array]:
    """The arrays of one layer for all rows, of those of each row."""
    return [mx.concatenate(list(arrays)) for arrays in zip(*rows, strict=True)]
