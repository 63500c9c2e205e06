"""The adapter bank: the low-rank factors of adapter versions, one version per slot.

Each `LinearGroup` has the arrays of linears with the same input, such as q_proj, k_proj and v_proj; the head, whose out
is the vocabulary, is a group of its own. Slot 0 is all zeros and stands for the base model. Smaller ranks are padded
with zeros, and an adapter's scale is multiplied into its b. Arrays are made when the first adapter needs them. Their
slots grow by doubling, and their rank grows to that of the largest adapter that has been written. So a server without
adapters allocates none, and one whose adapters do not change the head, or experts, allocates none for these.

    a  [slots, in, columns]         `rank` columns for each linear that adapters change, in order of first use
    b  [slots, tiles, rank, width]  one or more tiles for each of these linears, each for `width` of its outputs

All linears of a group have tiles of the same width, so that one `gather_mm` makes the products of all of them, whatever
the numbers of their outputs. Experts have one linear each, so their arrays have an axis more: a is [experts, slots, in,
columns]. The slots of an expert lie together, so that tokens that are sorted by expert, and then by slot, read the
factors in order.

If the model is split over several machines, each rank holds a part of the bank:

    linear split by output   a is whole, b has this rank's columns   the outputs of all ranks together are the whole
    linear split by input    a has this rank's rows, b is whole      the sum over the ranks is the whole

Files, checkpoints and everything outside this module know whole factors only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from weakref import ReferenceType, ref

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.forward_context import AdapterContext, BaseProduct, ForwardContext
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.config.types import human_bytes
from mlx_parallm.errors import AdapterTooLargeError


class LinearGroup:
    """The factors of linears that get the same input, in all slots.

    In slot s, the linear at place p has the factors a[..., s, :, p·rank : (p+1)·rank] and b[..., s, tiles[p], :, :].

    Attributes:
        rank: the rank that the arrays have room for.
        width: outputs of a tile of `b`. It divides the outputs of every linear.
        places: the place of each linear that has factors, by path.
        tiles: of the linear at each place, its part of the second axis of `b`.
        places_of_tiles: the place of the linear that each tile belongs to.
        starts: where the outputs of each linear but the first begin among those of all tiles.
        is_whole: whether `b` has the outputs of all linears, in the order of `specs`.
        written: the rank of what each slot holds; slots that are all zeros are left out.
        kept: what `factors` has returned since the arrays were changed last.
    """

    def __init__(self, specs: Sequence[LinearSpec], dtype: mx.Dtype) -> None:
        self.specs = {spec.path: spec for spec in specs}
        self.width = math.gcd(*(spec.out_features for spec in specs))
        self._joined: ReferenceType[BaseProduct] | None = None
        self._experts = specs[0].expert_axis
        assert not self._experts or all(spec.out_features == self.width for spec in specs)  # one tile for each linear
        self._in_features = specs[0].in_features
        self._dtype = dtype
        self._make_empty()

    def clear(self) -> None:
        """Frees the arrays."""
        self._make_empty()

    def _make_empty(self) -> None:
        """What `clear` does here; several ranks make a group each for itself, and clear it together."""
        self.rank = 0
        self.places: dict[str, int] = {}
        self.tiles: list[slice] = []
        self.places_of_tiles: tuple[int, ...] = ()
        self.starts: list[int] = []
        self.is_whole = False
        self.written: dict[int, int] = {}
        self.kept: dict[int, tuple[mx.array, list[mx.array]]] = {}
        self.a = mx.zeros((*self._experts, 0, self._in_features, 0), self._dtype)
        self.b = mx.zeros((*self._experts, 0, 0, 0, self.width), self._dtype)

    @property
    def slots(self) -> int:
        """The slots that the arrays have, slot 0 included."""
        return int(self.a.shape[-3])

    @property
    def nbytes(self) -> int:
        return int(self.a.nbytes + self.b.nbytes)

    @property
    def joined(self) -> BaseProduct | None:
        """The base model's product of all these linears at once, [..., in] → all outputs in the order of `specs`; None
        if they are not joined, or if the base model is gone, which a bank outlives."""
        return None if self._joined is None else self._joined()

    def join(self, product: BaseProduct) -> None:
        """Sets what is `joined`. The linears keep it."""
        self._joined = ref(product)

    def factors(self, slot: int) -> tuple[mx.array, list[mx.array]]:
        """The factors of one slot: a [in, columns], and b [rank, out] of each place. Not of experts. All are views,
        except for the b of a linear of several tiles."""
        if slot not in self.kept:
            tiles = self.b[slot : slot + 1].squeeze(0)
            self.kept[slot] = self.a[slot : slot + 1].squeeze(0), [_joined(tiles[each]) for each in self.tiles]
        return self.kept[slot]

    def nbytes_with(self, slots: int, paths: Iterable[str], rank: int) -> int:
        """The size in bytes after `fit` with the same arguments."""
        widths = [self.specs[path].out_features for path in {*self.places, *paths}]
        numbers = len(widths) * self._in_features + sum(widths)
        columns = max(rank, self.rank) * numbers
        return math.prod(self._experts) * max(slots, self.slots) * columns * self._dtype.size

    def fit(self, slots: int, paths: Sequence[str], rank: int = 0) -> bool:
        """Makes room for at least `slots` slots, for the linears at `paths`, and for this rank. Values stay as they
        are.

        Returns False if there was room already.
        """
        new = [path for path in paths if path not in self.places]
        more, wider, before = max(slots - self.slots, 0), max(rank - self.rank, 0), int(self.b.shape[-3])
        if not more and not wider and not new:
            return False
        a = self.a.reshape(*self.a.shape[:-1], len(self.places), self.rank)
        self.add_places(new)
        self.kept.clear()
        self.rank += wider
        a = mx.pad(a, [*self._experts_stay, (0, more), (0, 0), (0, len(new)), (0, wider)])
        self.a = a.flatten(-2)
        added = (0, len(self.places_of_tiles) - before)
        self.b = mx.pad(self.b, [*self._experts_stay, (0, more), added, (0, wider), (0, 0)])
        mx.eval(self.a, self.b)
        return True

    def add_places(self, paths: Iterable[str]) -> None:
        """Gives linears a place and tiles, after those that have some. The arrays stay as they are."""
        for path in paths:
            place, start = len(self.places), len(self.places_of_tiles)
            self.places_of_tiles += (place,) * (self.specs[path].out_features // self.width)
            self.places[path] = place
            self.tiles.append(slice(start, len(self.places_of_tiles)))
        self.starts = [tiles.start * self.width for tiles in self.tiles[1:]]
        self.is_whole = list(self.places) == list(self.specs)

    def write(self, slot: int, pairs: dict[str, LoRAPair]) -> None:
        """Writes one slot, and waits until it is written. Linears without a pair get zeros. Call `fit` first.

        MLX updates the arrays in place only while nothing else refers to them, so no forward pass that reads them may
        be in flight.
        """
        self.kept.clear()  # views are references
        left = self.written.pop(slot, 0)  # the rank of what is in the slot
        for path, place in self.places.items():
            pair, start, tiles = pairs.get(path), place * self.rank, self.tiles[place]
            rank = 0 if pair is None else pair.rank
            if pair is not None:
                self.a[..., slot, :, start : start + rank] = mx.array(pair.a).astype(self._dtype)
                b = mx.array(pair.b) if pair.scale == 1 else mx.array(pair.b).astype(mx.float32) * pair.scale
                b = b.astype(self._dtype).reshape(*self._experts, rank, -1, self.width)
                self.b[..., slot, tiles, :rank, :] = b.swapaxes(-3, -2)
            if left > rank:
                self.a[..., slot, :, start + rank : start + left] = 0
                self.b[..., slot, tiles, rank:left, :] = 0
        mx.eval(self.a, self.b)
        if pairs:
            self.written[slot] = max(pair.rank for pair in pairs.values())

    def read(self, slot: int, ranks: dict[str, int]) -> dict[str, LoRAPair]:
        """Copies of one slot's factors, without padding. Their scale is 1, because b includes it already.

        Writing them again restores the slot bit for bit.
        """
        pairs = {path: self._unpadded(slot, self.places[path], rank) for path, rank in ranks.items()}
        mx.eval([(pair.a, pair.b) for pair in pairs.values()])
        return pairs

    @property
    def _experts_stay(self) -> list[tuple[int, int]]:
        """How arrays are padded along the axis of experts, if they have one."""
        return [(0, 0)] * len(self._experts)

    def _unpadded(self, slot: int, place: int, rank: int) -> LoRAPair:
        column = self.rank * place
        a = mx.contiguous(self.a[..., slot, :, column : column + rank])
        return LoRAPair(a, mx.contiguous(_joined(self.b[..., slot, self.tiles[place], :rank, :])), 1.0)


def _joined(tiles: mx.array) -> mx.array:
    """Tiles [..., n, rank, width] as [..., rank, n · width]."""
    return tiles.squeeze(-3) if tiles.shape[-3] == 1 else tiles.swapaxes(-3, -2).flatten(-2, -1)


def exported(pair: LoRAPair, scale: float) -> LoRAPair:
    """A pair of MLX or NumPy arrays as float32 NumPy, rescaled to `scale`. With a scale of 0, whose b in a slot is all
    zeros, it keeps the scale that it has."""
    a, b = (np.array(mx.array(factor).astype(mx.float32)) for factor in (pair.a, pair.b))
    if scale in (pair.scale, 0):
        return LoRAPair(a, b, pair.scale)
    return LoRAPair(a, b * np.float32(pair.scale / scale), scale)


GroupMaker = Callable[[Sequence[LinearSpec], mx.Dtype], LinearGroup]
"""Makes an empty group of linears: (specs, dtype) → the group."""

_FIRST_SLOTS = 4
"""Slots of a new array, slot 0 included."""
_RANK_STEP = 8
"""Arrays have room for a multiple of this rank, or for the largest rank allowed."""


class AdapterBank:
    """The LoRA factors of all linears of a model, for several adapter versions. Device thread only.

    Args:
        layout: the linears that adapters may change.
        slots: number of adapter versions that it can hold, not counting slot 0.
        max_rank: the largest rank of an adapter.
        dtype: dtype of the model's activations.
        limit: most bytes that it may take.
        make_group: makes its groups; see `split` for a model over several machines.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        slots: int,
        max_rank: int,
        dtype: mx.Dtype,
        limit: int = sys.maxsize,
        make_group: GroupMaker = LinearGroup,
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.limit = limit
        self.context: AdapterContext | None = None
        self._forward: ForwardContext | None = None
        by_group: dict[str, list[LinearSpec]] = {}
        for spec in layout:
            by_group.setdefault(spec.group, []).append(spec)
        self.groups = {name: make_group(specs, dtype) for name, specs in by_group.items()}

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups.values())

    @contextmanager
    def forward(self, slots: Sequence[int], lengths: Sequence[int]) -> Iterator[None]:
        """While the block runs, the model's adapted linears use slot `slots[i]` for the `lengths[i]` tokens of row i.
        If all rows use the base model, adapted linears add nothing.

        The context is kept for the next pass, which most often has the same rows.
        """
        rows = tuple(slots), tuple(lengths)
        if not any(slots):
            context = None
        elif self._forward is not None and self._forward.rows == rows:
            context = self._forward
        else:
            context = self._forward = ForwardContext(*rows)
        with self.using(context):
            try:
                yield
            finally:
                if context is not None:
                    context.end()

    @contextmanager
    def using(self, context: AdapterContext | None) -> Iterator[None]:
        """While the block runs, the model's adapted linears call `context`. If it is None, they add nothing."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before

    def using_part(self, start: int, stop: int) -> AbstractContextManager[None]:
        """While the block runs, the adapted linears are called for the tokens [start, stop) of the current forward
        pass alone; see `AdapterContext.part`."""
        return self.using(None if self.context is None else self.context.part(start, stop))

    def check_room(self, slot: int, weights: AdapterWeights) -> None:
        """Raises AdapterTooLargeError: with these weights in the slot, the bank would take more than its limit."""
        slots, rank = self._capacity(slot), self._room_for(weights)
        needed = 0
        for group in self.groups.values():
            paths = [path for path in group.specs if path in weights.pairs]
            needed += group.nbytes_with(slots, paths, rank if paths else 0)
        if needed > self.limit:
            raise AdapterTooLargeError(
                f"with this adapter, the adapter bank needs {human_bytes(needed)} for {slots - 1} slots of rank "
                f"{rank}, and may take {human_bytes(self.limit)} of the memory that requests share: lower "
                "--max-lora-rank or --max-loras, raise --kv-cache-memory, or train an adapter of fewer linears, such "
                "as one without experts"
            )

    def write(self, slot: int, weights: AdapterWeights) -> Iterator[None]:
        """Writes one slot. Each `next` grows or writes one group of linears, a short unit of device work."""
        assert 1 <= slot <= self.slots
        slots, rank = self._capacity(slot), self._room_for(weights)
        for group in self.groups.values():
            pairs = {path: weights.pairs[path] for path in group.specs if path in weights.pairs}
            if (pairs or group.places) and group.fit(slots, tuple(pairs), rank if pairs else 0):
                yield
            if pairs or slot in group.written:
                group.write(slot, pairs)
                yield

    def make_room(self, slot: int) -> Iterator[None]:
        """Grows the arrays so that they have this slot, one group at a time."""
        slots = self._capacity(slot)
        for group in self.groups.values():
            if group.places and group.fit(slots, ()):
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
        """The number of slots, slot 0 included, of arrays that include `slot`: a power of two, or all slots.

        It is the same for all groups, because a forward pass reads every slot of its rows in each group that one of
        their adapters changes.
        """
        held = max((group.slots for group in self.groups.values()), default=0)
        return min(max(_FIRST_SLOTS, held, 1 << slot.bit_length()), self.slots + 1)

    def _room_for(self, weights: AdapterWeights) -> int:
        """The rank that arrays need for an adapter."""
        return min(math.ceil(weights.rank / _RANK_STEP) * _RANK_STEP, self.max_rank)


class SplitBy(StrEnum):
    """Which features of a linear are divided among the ranks."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class LinearSplit:
    """How a linear is divided. `padded`: its number of inputs or outputs, with those that were added as zeros so that
    it can be divided."""

    by: SplitBy
    padded: int


@dataclass(frozen=True)
class ModelSplit:
    """How the linears of a model are divided among ranks. Linears that are not in `linears` are whole on every rank."""

    group: mx.distributed.Group
    linears: Mapping[str, LinearSplit]

    def spec(self, spec: LinearSpec) -> LinearSpec:
        """The shape of this rank's part of a linear."""
        split = self.linears.get(spec.path)
        if split is None:
            return spec
        part = split.padded // self.group.size()
        if split.by is SplitBy.OUTPUT:
            return replace(spec, out_features=part)
        return replace(spec, in_features=part)

    def part(self, path: str, pair: LoRAPair) -> LoRAPair:
        """This rank's part of a whole pair."""
        split = self.linears.get(path)
        if split is None:
            return pair
        size = split.padded // self.group.size()
        mine = slice(self.group.rank() * size, (self.group.rank() + 1) * size)
        if split.by is SplitBy.OUTPUT:
            return replace(pair, b=_padded(mx.array(pair.b), 1, split.padded)[:, mine])
        return replace(pair, a=_padded(mx.array(pair.a), 0, split.padded)[mine])

    def whole(self, spec: LinearSpec, pair: LoRAPair) -> LoRAPair:
        """The whole pair of which every rank has a part. All ranks call it at once. `spec`: of the whole linear."""
        split = self.linears.get(spec.path)
        if split is None:
            return pair
        if split.by is SplitBy.OUTPUT:
            return replace(pair, b=self._gather(pair.b.T)[: spec.out_features].T)
        return replace(pair, a=self._gather(pair.a)[: spec.in_features])

    def _gather(self, part: mx.array) -> mx.array:
        return mx.distributed.all_gather(mx.contiguous(part), group=self.group)


class SplitGroup(LinearGroup):
    """The factors of one rank. It takes and returns whole pairs."""

    def __init__(self, specs: Sequence[LinearSpec], dtype: mx.Dtype, split: ModelSplit) -> None:
        super().__init__([split.spec(spec) for spec in specs], dtype)
        self._whole_specs = {spec.path: spec for spec in specs}
        self._split = split

    def write(self, slot: int, pairs: dict[str, LoRAPair]) -> None:
        """See `LinearGroup.write`."""
        super().write(slot, {path: self._split.part(path, pair) for path, pair in pairs.items()})

    def read(self, slot: int, ranks: dict[str, int]) -> dict[str, LoRAPair]:
        """See `LinearGroup.read`. All ranks call it at once."""
        parts = super().read(slot, ranks)
        pairs = {path: self._split.whole(self._whole_specs[path], part) for path, part in parts.items()}
        mx.eval([(pair.a, pair.b) for pair in pairs.values()])
        return pairs


def _padded(array: mx.array, axis: int, size: int) -> mx.array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return mx.pad(array, widths)
