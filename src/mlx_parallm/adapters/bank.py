"""The adapter bank: every adapted linear's low-rank factors, one slot for each adapter version on the device.

    group q_proj k_proj v_proj      a  [slots, in, columns]        columns: max_rank for each linear that some
                                    b  [slots, max_rank, out]      adapter has changed, in order of first use

Slot 0 is zeros: the base. Slots are padded to one rank with zeros, scales are folded into b. Arrays are made when
the first adapter needs them and grow by doubling, so a server without adapters holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import mlx.core as mx

from mlx_parallm.adapters.context import forward_context
from mlx_parallm.adapters.layout import AdapterLayout, LinearSpec
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair

_FIRST_SLOTS = 4
"""Slots of an array when it is made, slot 0 included."""


class LinearGroup:
    """The factors of linears that share an input. Slot s of the linear at place p: a[s, :, p·rank : (p+1)·rank], b[s].

    `places`: of the linears that have factors, by path. `written`: slots that may hold something other than zeros.
    """

    def __init__(self, specs: Sequence[LinearSpec], rank: int, dtype: mx.Dtype) -> None:
        self.specs = {spec.path: spec for spec in specs}
        self.rank = rank
        self.places: dict[str, int] = {}
        self.b: dict[str, mx.array] = {}
        self.written: set[int] = set()
        self._dtype = dtype
        self.a = self._empty()

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes) + sum(int(b.nbytes) for b in self.b.values())

    def fit(self, slots: int, paths: Sequence[str]) -> bool:
        """Makes room for `slots` slots of these linears; False when it was there. Keeps what is written."""
        new = [path for path in paths if path not in self.b]
        held = self.a.shape[0]
        more = max(slots - held, 0)
        if not more and not new:
            return False
        self.a = mx.pad(self.a, [(0, more), (0, 0), (0, len(new) * self.rank)])
        self.b = {path: mx.pad(b, [(0, more), (0, 0), (0, 0)]) for path, b in self.b.items()}
        for path in new:
            self.places[path] = len(self.places)
            self.b[path] = mx.zeros((held + more, self.rank, self.specs[path].out_features), self._dtype)
        mx.eval(self.a, self.b)
        return True

    def write(self, slot: int, pairs: dict[str, LoRAPair]) -> None:
        """Writes one slot, in place, and waits for it; linears without a pair become zeros. There is room.

        In place holds while nobody else has the arrays: no forward that reads them may be in flight.
        """
        for path, place in self.places.items():
            column = place * self.rank
            self.a[slot, :, column : column + self.rank] = self._padded_a(path, pairs.get(path))
            self.b[path][slot] = self._padded_b(path, pairs.get(path))
        mx.eval(self.a, self.b)
        self.written.add(slot)
        if not pairs:
            self.written.discard(slot)

    def read(self, slot: int, ranks: dict[str, int]) -> dict[str, LoRAPair]:
        """Copies of one slot's factors, unpadded, with scale 1: what `write` restores to the bit."""
        pairs = {path: self._unpadded(slot, path, rank) for path, rank in ranks.items()}
        mx.eval([(pair.a, pair.b) for pair in pairs.values()])
        return pairs

    def clear(self) -> None:
        """Gives the arrays back."""
        self.places, self.b, self.written = {}, {}, set()
        self.a = self._empty()

    def _empty(self) -> mx.array:
        inputs = next(iter(self.specs.values())).in_features
        return mx.zeros((0, inputs, 0), self._dtype)

    def _unpadded(self, slot: int, path: str, rank: int) -> LoRAPair:
        column = self.rank * self.places[path]
        a = mx.contiguous(self.a[slot, :, column : column + rank])
        return LoRAPair(a, mx.contiguous(self.b[path][slot, :rank]), 1.0)

    def _padded_a(self, path: str, pair: LoRAPair | None) -> mx.array:
        if pair is None:
            return mx.zeros((self.specs[path].in_features, self.rank), self._dtype)
        a = mx.array(pair.a).astype(self._dtype)
        return a if pair.rank == self.rank else mx.pad(a, [(0, 0), (0, self.rank - pair.rank)])

    def _padded_b(self, path: str, pair: LoRAPair | None) -> mx.array:
        if pair is None:
            return mx.zeros((self.rank, self.specs[path].out_features), self._dtype)
        b = mx.array(pair.b)
        scaled = b if pair.scale == 1.0 else b.astype(mx.float32) * pair.scale
        scaled = scaled.astype(self._dtype)
        return scaled if pair.rank == self.rank else mx.pad(scaled, [(0, self.rank - pair.rank), (0, 0)])


class Adapting(Protocol):
    """What an adapted linear asks for in one forward: `ForwardContext` while serving."""

    def adapt(self, group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y of the base and what the adapter adds, x [B, T, in] and y [B, T, out] of the linear at `path`."""
        ...


class AdapterBank:
    """All groups of a model. Device thread only.

    Args:
        layout: the linears that adapters may change.
        slots: adapter versions it can hold, slot 0 apart.
        max_rank: rank of every slot.
        dtype: of the model's activations.
    """

    def __init__(self, layout: AdapterLayout, slots: int, max_rank: int, dtype: mx.Dtype) -> None:
        self.layout = layout
        self.slots = slots
        self.max_rank = max_rank
        self.context: Adapting | None = None
        by_group: dict[str, list[LinearSpec]] = {}
        for spec in layout.linears.values():
            by_group.setdefault(spec.group, []).append(spec)
        self.groups = {name: LinearGroup(specs, max_rank, dtype) for name, specs in by_group.items()}

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups.values())

    def forward(self, slots: Sequence[int], lengths: Sequence[int]) -> AbstractContextManager[None]:
        """While the block runs, the model's adapted linears use these slots: one for each row of `lengths` tokens."""
        return self.using(forward_context(slots, lengths))

    @contextmanager
    def using(self, context: Adapting | None) -> Iterator[None]:
        """While the block runs, the model's adapted linears ask `context` what to add; None: nothing."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before

    def write(self, slot: int, weights: AdapterWeights) -> Iterator[None]:
        """Writes one slot, a group of linears at a time: each `next` is one short unit of device work."""
        assert 1 <= slot <= self.slots
        for group in self.groups.values():
            pairs = {path: weights.pairs[path] for path in group.specs if path in weights.pairs}
            if pairs and group.fit(self._capacity(slot), tuple(pairs)):
                yield
            if pairs or slot in group.written:
                group.write(slot, pairs)
                yield

    def has_room(self, slot: int) -> bool:
        """Whether what is held of the bank has this slot."""
        return all(group.a.shape[0] > slot for group in self.groups.values() if group.places)

    def make_room(self, slot: int) -> Iterator[None]:
        """Grows what is held so that it has this slot, a group at a time."""
        for group in self.groups.values():
            if group.places and group.fit(self._capacity(slot), ()):
                yield

    def read(self, slot: int, ranks: dict[str, int], into: dict[str, LoRAPair]) -> Iterator[None]:
        """Copies one slot's pairs, unpadded, a group at a time. `ranks` by path; `into` is filled."""
        for group in self.groups.values():
            mine = {path: ranks[path] for path in group.specs if path in ranks}
            if mine:
                into.update(group.read(slot, mine))
                yield

    def clear(self) -> None:
        """Forgets every slot. For use after a failed write, whose arrays cannot be trusted."""
        for group in self.groups.values():
            group.clear()

    def _capacity(self, slot: int) -> int:
        """Array slots, slot 0 included, so that `slot` is there: a power of two, or all of them."""
        return min(max(_FIRST_SLOTS, 1 << slot.bit_length()), self.slots + 1)
