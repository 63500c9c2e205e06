"""The adapter bank: the low-rank factors of adapter versions, one version per slot, and their use in a forward pass.

    a  [slots, in, columns]     one for each group of linears with the same input, such as q_proj, k_proj and v_proj;
                                max_rank columns for each linear that some adapter changes, in order of first use
    b  [slots, max_rank, out]   one for each of these linears

The head, whose out is the vocabulary, is a group of its own. Slot 0 is all zeros and stands for the base model. Smaller
ranks are padded with zeros to max_rank, and an adapter's scale is multiplied into its b. Arrays are made when the first
adapter needs them and grow by doubling, so a server without adapters allocates none, and one whose adapters do not
change the head allocates none for the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

import mlx.core as mx

from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair

_FIRST_SLOTS = 4
"""Slots of a new array, slot 0 included."""


class LinearGroup:
    """The factors of linears that get the same input, in all slots.

    In slot s, the linear at place p has the factors a[s, :, p·rank : (p+1)·rank] and b[path][s]. `places`: the place of
    each linear that has factors, by path. `written`: slots that may hold values other than zero.
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
        """Makes room for at least `slots` slots and for the linears at `paths`. Values stay as they are.

        Returns False if there was room already.
        """
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
        """Writes one slot, and waits until it is written. Linears without a pair get zeros. Call `fit` first.

        MLX updates the arrays in place only while nothing else refers to them, so no forward pass that reads them may
        be in flight.
        """
        for path, place in self.places.items():
            columns = slice(place * self.rank, (place + 1) * self.rank)
            pair = pairs.get(path)
            if pair is None:
                self.a[slot, :, columns], self.b[path][slot] = 0, 0
            else:
                missing = (0, self.rank - pair.rank)
                b = mx.array(pair.b).astype(mx.float32) * pair.scale
                self.a[slot, :, columns] = mx.pad(mx.array(pair.a).astype(self._dtype), [(0, 0), missing])
                self.b[path][slot] = mx.pad(b.astype(self._dtype), [missing, (0, 0)])
        mx.eval(self.a, self.b)
        self.written.add(slot)
        if not pairs:
            self.written.discard(slot)

    def read(self, slot: int, ranks: dict[str, int]) -> dict[str, LoRAPair]:
        """Copies of one slot's factors, without padding. Their scale is 1, because b includes it already.

        Writing them again restores the slot bit for bit.
        """
        pairs = {path: self._unpadded(slot, path, rank) for path, rank in ranks.items()}
        mx.eval([(pair.a, pair.b) for pair in pairs.values()])
        return pairs

    def clear(self) -> None:
        """Frees the arrays."""
        self.places, self.b, self.written = {}, {}, set()
        self.a = self._empty()

    def _empty(self) -> mx.array:
        inputs = next(iter(self.specs.values())).in_features
        return mx.zeros((0, inputs, 0), self._dtype)

    def _unpadded(self, slot: int, path: str, rank: int) -> LoRAPair:
        column = self.rank * self.places[path]
        a = mx.contiguous(self.a[slot, :, column : column + rank])
        return LoRAPair(a, mx.contiguous(self.b[path][slot, :rank]), 1.0)


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens [start, stop) of the flattened batch, in `batch` parts of equal length. Each part uses one slot.

    `slots`: the slot of each part, uint32 [batch]; None if all tokens use the base model. `parts`: the number of each
    part, uint32 [batch], which MLX would otherwise compute again for every linear.
    """

    start: int
    stop: int
    batch: int
    slots: mx.array | None
    parts: mx.array


class ForwardContext:
    """Adds the product of each token's own adapter to the outputs of the linears, in one forward pass.

        single tokens, several slots   gather_mm picks each token's own factors
        single tokens, one slot        one dense product
        chunks                         one dense product for each run of tokens with the same slot

    A forward pass may hold single tokens and chunks. Its input is [N, 1, in], or [1, T, in] for one row.

    Args:
        slots: the slot of each row.
        lengths: the number of tokens of each row.
    """

    def __init__(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._rows = slots, lengths
        self._slots = frozenset(slots)
        self._last: tuple[LinearGroup, mx.array, list[mx.array]] | None = None

    def adapt(self, group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + (x A[slot]) B[slot] for the linear at `path`, with x [B, T, in], y [B, T, out]. B includes the scale."""
        place = group.places.get(path)
        if place is None or group.written.isdisjoint(self._slots):  # no adapter of these rows changes this linear
            return y
        return y + self._product(self._down(group, x)[place], group.b[path])

    @cached_property
    def _runs(self) -> list[_Run]:
        return _runs(*self._rows)

    def _down(self, group: LinearGroup, x: mx.array) -> list[mx.array]:
        """x A[slot] of each linear of the group, [B, T, rank]; computed once for linears with the same input."""
        last = self._last
        if last is None or last[0] is not group or last[1] is not x:
            h = self._product(x, group.a)
            places = len(group.places)
            last = self._last = (group, x, list(mx.split(h, places, axis=-1)) if places > 1 else [h])
        return last[2]

    def _product(self, x: mx.array, factors: mx.array) -> mx.array:
        """Multiplies x [B, T, k] by the factors [slots, k, m] of each token's slot. Returns [B, T, m]."""
        shape = (*x.shape[:-1], factors.shape[-1])
        if len(self._runs) == 1:
            return _gathered(x, self._runs[0], factors).reshape(shape)
        rows = x.reshape(1, -1, x.shape[-1])
        parts = [_gathered(rows[:, run.start : run.stop], run, factors) for run in self._runs]
        return mx.concatenate(parts, axis=1).reshape(shape)


def gathers() -> bool:
    """Whether `gather_mm` multiplies factors; otherwise they are copied for each part, and a plain product is made.

    With MLX 0.32 on CUDA, `gather_mm` gives wrong products if the matrices on the left are not consecutive in memory.
    It fails if one of them has more than 64 float32 rows, or if the width of the result is no multiple of 8.
    """
    return not mx.cuda.is_available()


def _gathered(x: mx.array, run: _Run, factors: mx.array) -> mx.array:
    if run.slots is None:
        return mx.zeros((1, run.stop - run.start, factors.shape[-1]), x.dtype)
    parts = x.reshape(run.batch, -1, x.shape[-1])
    if gathers():
        products = mx.gather_mm(parts, factors, lhs_indices=run.parts, rhs_indices=run.slots)
    else:
        products = parts @ factors[run.slots]
    return products.reshape(1, run.stop - run.start, factors.shape[-1])


def _runs(slots: Sequence[int], lengths: Sequence[int]) -> list[_Run]:
    """Single tokens with different slots become one run, which gathers each token's factors. Of the other tokens,
    neighbours with the same slot become one run."""
    single_slots = {slot for slot, length in zip(slots, lengths, strict=True) if length == 1}
    gathers = len(single_slots) > 1
    runs: list[_Run] = []
    start = 0
    for (gathered, slot), group in groupby(
        zip(slots, lengths, strict=True), key=lambda row: (True, 0) if gathers and row[1] == 1 else (False, row[0])
    ):
        rows = list(group)
        stop = start + sum(length for _, length in rows)
        if gathered:
            runs.append(_run(start, stop, [each for each, _ in rows]))
        else:
            runs.append(_run(start, stop, [slot]))
        start = stop
    return runs


def _run(start: int, stop: int, slots: Sequence[int]) -> _Run:
    parts = mx.arange(len(slots), dtype=mx.uint32)
    return _Run(start, stop, len(slots), mx.array(list(slots), mx.uint32) if any(slots) else None, parts)


class AdapterContext(Protocol):
    """The object that adapted linears call during a forward pass: a `ForwardContext`, or the trainer's own class."""

    def adapt(self, group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """The output of the linear at `path`, with input x [B, T, in] and the base model's output y [B, T, out]."""
        ...


class AdapterBank:
    """The LoRA factors of all linears of a model, for several adapter versions. Device thread only.

    Args:
        layout: the linears that adapters may change.
        slots: number of adapter versions that it can hold, not counting slot 0.
        max_rank: the rank to which every slot is padded.
        dtype: dtype of the model's activations.
    """

    def __init__(self, layout: AdapterLayout, slots: int, max_rank: int, dtype: mx.Dtype) -> None:
        self.layout = layout
        self.slots = slots
        self.max_rank = max_rank
        self.context: AdapterContext | None = None
        by_group: dict[str, list[LinearSpec]] = {}
        for spec in layout:
            by_group.setdefault(spec.group, []).append(spec)
        self.groups = {name: LinearGroup(specs, max_rank, dtype) for name, specs in by_group.items()}

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups.values())

    def forward(self, slots: Sequence[int], lengths: Sequence[int]) -> AbstractContextManager[None]:
        """While the block runs, the model's adapted linears use slot `slots[i]` for the `lengths[i]` tokens of row i.
        If all rows use the base model, adapted linears add nothing."""
        return self.using(ForwardContext(slots, lengths) if any(slots) else None)

    @contextmanager
    def using(self, context: AdapterContext | None) -> Iterator[None]:
        """While the block runs, the model's adapted linears call `context`. If it is None, they add nothing."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before

    def write(self, slot: int, weights: AdapterWeights) -> Iterator[None]:
        """Writes one slot. Each `next` grows or writes one group of linears, a short unit of device work."""
        assert 1 <= slot <= self.slots
        for group in self.groups.values():
            pairs = {path: weights.pairs[path] for path in group.specs if path in weights.pairs}
            if pairs and group.fit(self._capacity(slot), tuple(pairs)):
                yield
            if pairs or slot in group.written:
                group.write(slot, pairs)
                yield

    def make_room(self, slot: int) -> Iterator[None]:
        """Grows the arrays so that they have this slot, one group at a time."""
        for group in self.groups.values():
            if group.places and group.fit(self._capacity(slot), ()):
                yield

    def read(self, slot: int, ranks: dict[str, int], into: dict[str, LoRAPair]) -> Iterator[None]:
        """Copies one slot's pairs into `into`, without padding, one group at a time. `ranks`: the rank of each path."""
        for group in self.groups.values():
            mine = {path: ranks[path] for path in group.specs if path in ranks}
            if mine:
                into.update(group.read(slot, mine))
                yield

    def clear(self) -> None:
        """Frees all slots. Needed after a failed write, because the arrays may hold wrong values."""
        for group in self.groups.values():
            group.clear()

    def _capacity(self, slot: int) -> int:
        """The number of slots, slot 0 included, of arrays that include `slot`: a power of two, or all slots."""
        return min(max(_FIRST_SLOTS, 1 << slot.bit_length()), self.slots + 1)
