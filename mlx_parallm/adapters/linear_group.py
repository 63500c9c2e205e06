"""The low-rank factors of linears with the same input, for all slots of the adapter bank.

    a  [slots, in, columns]     max_rank columns for each linear that some adapter changes, in order of first use
    b  [slots, max_rank, out]   one for each of these linears

Experts have one linear each, so their arrays have an axis more: a is [experts, slots, in, columns]. The slots of an
expert lie together, so that tokens that are sorted by expert, and then by slot, read the factors in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlx_parallm.adapters.weights import LinearSpec, LoRAPair


class LinearGroup:
    """The factors of linears that get the same input, in all slots.

    In slot s, the linear at place p has the factors a[..., s, :, p·rank : (p+1)·rank] and b[path][..., s, :, :].
    `places`: the place of each linear that has factors, by path. `written`: slots that may hold values other than zero.
    `kept`: what `factors` returned since the arrays were changed last.
    """

    def __init__(self, specs: Sequence[LinearSpec], rank: int, dtype: mx.Dtype) -> None:
        self.specs = {spec.path: spec for spec in specs}
        self.rank = rank
        self.places: dict[str, int] = {}
        self.b: dict[str, mx.array] = {}
        self.written: set[int] = set()
        self.kept: dict[int, tuple[mx.array, dict[str, mx.array]]] = {}
        self._dtype = dtype
        self.a = self._empty()

    @property
    def slots(self) -> int:
        """The slots that the arrays have, slot 0 included."""
        return int(self.a.shape[-3])

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes) + sum(int(b.nbytes) for b in self.b.values())

    def factors(self, slot: int) -> tuple[mx.array, dict[str, mx.array]]:
        """Views of one slot: a [in, columns], and b [max_rank, out] by path. Not of experts."""
        if slot not in self.kept:
            b = {path: b[slot : slot + 1].squeeze(0) for path, b in self.b.items()}
            self.kept[slot] = self.a[slot : slot + 1].squeeze(0), b
        return self.kept[slot]

    def nbytes_with(self, slots: int, paths: Iterable[str]) -> int:
        """The size in bytes after `fit` with the same arguments."""
        widths = [self.specs[path].out_features for path in {*self.places, *paths}]
        numbers = len(widths) * self._spec.in_features + sum(widths)
        return math.prod(self._spec.expert_axis) * max(slots, self.slots) * self.rank * numbers * self._dtype.size

    def fit(self, slots: int, paths: Sequence[str]) -> bool:
        """Makes room for at least `slots` slots and for the linears at `paths`. Values stay as they are.

        Returns False if there was room already.
        """
        new = [path for path in paths if path not in self.b]
        held = self.slots
        more = max(slots - held, 0)
        if not more and not new:
            return False
        self.kept.clear()
        self.a = mx.pad(self.a, [*self._experts_stay, (0, more), (0, 0), (0, len(new) * self.rank)])
        self.b = {path: mx.pad(b, [*self._experts_stay, (0, more), (0, 0), (0, 0)]) for path, b in self.b.items()}
        for path in new:
            self.places[path] = len(self.places)
            self.b[path] = self._zeros(held + more, self.rank, self.specs[path].out_features)
        mx.eval(self.a, self.b)
        return True

    def write(self, slot: int, pairs: dict[str, LoRAPair]) -> None:
        """Writes one slot, and waits until it is written. Linears without a pair get zeros. Call `fit` first.

        MLX updates the arrays in place only while nothing else refers to them, so no forward pass that reads them may
        be in flight.
        """
        self.kept.clear()  # views are references
        for path, place in self.places.items():
            columns = slice(place * self.rank, (place + 1) * self.rank)
            pair = pairs.get(path)
            if pair is None:
                self.a[..., slot, :, columns], self.b[path][..., slot, :, :] = 0, 0
            else:
                missing, whole = (0, self.rank - pair.rank), self._experts_stay
                b = mx.array(pair.b).astype(mx.float32) * pair.scale
                a = mx.array(pair.a).astype(self._dtype)
                self.a[..., slot, :, columns] = mx.pad(a, [*whole, (0, 0), missing])
                self.b[path][..., slot, :, :] = mx.pad(b.astype(self._dtype), [*whole, missing, (0, 0)])
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
        self.places, self.b, self.written, self.kept = {}, {}, set(), {}
        self.a = self._empty()

    def _empty(self) -> mx.array:
        return self._zeros(0, self._spec.in_features, 0)

    def _zeros(self, slots: int, rows: int, columns: int) -> mx.array:
        return mx.zeros((*self._spec.expert_axis, slots, rows, columns), self._dtype)

    @property
    def _spec(self) -> LinearSpec:
        return next(iter(self.specs.values()))

    @property
    def _experts_stay(self) -> list[tuple[int, int]]:
        """How arrays are padded along the axis of experts, if they have one."""
        return [(0, 0)] * len(self._spec.expert_axis)

    def _unpadded(self, slot: int, path: str, rank: int) -> LoRAPair:
        column = self.rank * self.places[path]
        a = mx.contiguous(self.a[..., slot, :, column : column + rank])
        return LoRAPair(a, mx.contiguous(self.b[path][..., slot, :rank, :]), 1.0)
