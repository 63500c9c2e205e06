"""How a forward pass adds the product of each token's own adapter to what the linears give.

Adapted linears call the bank's `AdapterContext`. While requests are served it is a `ForwardContext`, which reads the
slots of the bank. Training has a class of its own, and so has a program that calls the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.weights import AdapterWeights

if TYPE_CHECKING:
    from mlx_parallm.adapters.bank import LinearGroup

BaseProduct = Callable[[mx.array], mx.array]
"""A linear of the base model: x [..., in] → [..., out]."""


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """The number of each token's adapter in a forward pass: `numbers`, uint32 [tokens], below `count`."""

    numbers: mx.array
    count: int


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """What experts compute in one call. A pair is a token with one of the experts that were chosen for it.

    x: inputs of the pairs, [..., 1, in]. experts, adapters: the expert of each pair, and the number of its token's
    adapter: uint32, of one shape that those of x [...] can be broadcast to. are_sorted: whether the pairs are sorted by
    expert, and then by adapter.
    """

    x: mx.array
    experts: mx.array
    adapters: mx.array
    are_sorted: bool

    def product(self, x: mx.array, factors: mx.array, indices: mx.array) -> mx.array:
        """x [..., 1, k] of the pairs times factors [n, k, m], of which `indices` chooses those of each pair."""
        if gathers():
            return mx.gather_mm(x, factors, rhs_indices=indices, sorted_indices=self.are_sorted)
        return x @ factors[indices]


@dataclass(frozen=True, slots=True)
class HeadsCall:
    """What a module with one matrix per attention head computes in one call. See `weights.HeadParts`.

    x: [n, heads, T, k]; latents may have one head for all. columns: which of the linear's outputs for a head the module
    knows. to_latents: whether the product goes from these to latents, and not the other way.
    """

    x: mx.array
    heads: int
    columns: slice
    to_latents: bool

    def change(self, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """The product of x [n, heads, T, k] with factors a [p, latent, rank] and b [p, rank, out], one pair for each of
        p equal parts of x. Returns [n, heads, T, m]."""
        parts = x.reshape(len(a), -1, *x.shape[1:]).swapaxes(1, 2).flatten(2, 3)
        a, b = a[:, None], b.reshape(*b.shape[:2], self.heads, -1)[..., self.columns].swapaxes(1, 2)
        y = (parts @ b.swapaxes(2, 3)) @ a.swapaxes(2, 3) if self.to_latents else (parts @ a) @ b
        y = y.reshape(*y.shape[:2], -1, x.shape[2], y.shape[-1]).swapaxes(1, 2)
        return y.flatten(0, 1)


class AdapterContext(Protocol):
    """The object that adapted linears call during a forward pass: a `ForwardContext`, or the trainer's own class."""

    def adapt(self, group: LinearGroup, path: str, x: mx.array, base: BaseProduct) -> mx.array:
        """The output [B, T, out] of the linear at `path`, with input x [B, T, in]; `base` is the base model's linear,
        which can be called with tokens in any shape [..., in]."""

    def changes(self, groups: Iterable[LinearGroup]) -> bool:
        """Whether an adapter of this pass changes a linear of these groups."""

    def token_adapters(self) -> TokenAdapters | None:
        """Which of several adapters each token uses; None if all tokens use the same."""

    def adapt_experts(self, group: LinearGroup, path: str, call: ExpertCall, y: mx.array) -> mx.array:
        """The output of the experts' linears at `path`, with the base model's output y."""

    def adapt_heads(self, group: LinearGroup, path: str, call: HeadsCall, y: mx.array) -> mx.array:
        """The output of a module that does a part of the work of the linear at `path`, with the base model's output
        y."""

    def part(self, start: int, stop: int) -> AdapterContext:
        """The context of the tokens [start, stop) of the pass alone, which are those of whole rows. A linear that is
        called token by token, as in a recurrence, may get one token of each of these rows at a time, in their order."""


@dataclass(frozen=True, slots=True)
class _SameSlot:
    """Tokens from `start` on that all use one slot: plain products, the second of which adds the base's output."""

    start: int
    slot: int

    @property
    def slots(self) -> mx.array:
        return mx.array([self.slot], mx.uint32)

    def rows(self, x: mx.array) -> mx.array:
        """x [..., in] in the shape that products take: [tokens, in]."""
        return mx.flatten(x, 0, -2)

    def change(self, group: LinearGroup, x: mx.array) -> list[mx.array]:
        """x A of each linear of the group, [tokens, rank]; nothing if the slot's adapter changes none of them."""
        if self.slot not in group.written:
            return []
        h, places = x @ group.factors(self.slot)[0], len(group.places)
        if len(h) == 1 and places > 1:  # Metal copies a vector that is a part of a longer row
            return list(mx.split(h.reshape(places, -1), places))
        return _by_place(h, group)

    def add(self, y: mx.array, change: list[mx.array], group: LinearGroup, place: int) -> mx.array:
        """y + x A B, with x A of `change`."""
        return mx.addmm(y, change[place], group.factors(self.slot)[1][place]) if change else y


@dataclass(frozen=True, slots=True)
class _OwnSlots:
    """Single tokens from `start` on, each of its own slot.

    `tokens`, `slots`: 0, 1, 2, … and the slots: uint32 [tokens]. `gathers`: see the function. `indices`: what
    `_indices` has made, by `LinearGroup.places_of_tiles`.
    """

    start: int
    tokens: mx.array
    slots: mx.array
    gathers: bool
    indices: dict[tuple[int, ...], tuple[mx.array, mx.array]] = field(default_factory=dict)

    def rows(self, x: mx.array) -> mx.array:
        """x [..., in] in the shape that products take: [tokens, 1, in]."""
        return x if x.ndim == 3 and x.shape[1] == 1 else x.reshape(-1, 1, x.shape[-1])

    def change(self, group: LinearGroup, x: mx.array) -> list[mx.array]:
        """x A[slot] B[slot] of each linear of the group, [tokens, 1, out]."""
        return _by_tile(self.whole_change(group, x), group)

    def whole_change(self, group: LinearGroup, x: mx.array) -> mx.array:
        """The same of all linears, [tokens, 1, outputs], by two products.

        Each vector of x A is whole in memory between them, [tokens · places, 1, rank], because Metal copies one that
        is a part of a longer row.
        """
        vectors, tiles = self._indices(group)
        if self.gathers:
            h = mx.gather_mm(x, group.a, self.tokens, self.slots)
            h = mx.reshape(h, (-1, 1, group.rank)) if group.starts else h
            y = mx.gather_mm(h, group.b, vectors, tiles)
        else:
            h = (x @ group.a[self.slots]).reshape(-1, 1, group.rank)
            y = h[vectors] @ group.b.flatten(0, 1)[tiles]
        return y if y.ndim == 3 else mx.reshape(y, (len(x), 1, -1))

    def add(self, y: mx.array, change: list[mx.array], group: LinearGroup, place: int) -> mx.array:
        """y + x A[slot] B[slot], of `change`."""
        return y + (change[place] if y.ndim == 3 else change[place].squeeze(1))

    def _indices(self, group: LinearGroup) -> tuple[mx.array, mx.array]:
        """For each token and tile, the number of its vector among those of all places, and of its tile among those of
        all slots: uint32 [tokens, tiles] each, or [tokens] if there is one tile."""
        places = group.places_of_tiles
        if places not in self.indices:
            tokens, slots = np.array(self.tokens)[:, None], np.array(self.slots)[:, None]
            both = tokens * len(group.places) + np.array(places), slots * len(places) + np.arange(len(places))
            vectors, tiles = (mx.array((each[:, 0] if len(places) == 1 else each).astype(np.uint32)) for each in both)
            self.indices[places] = vectors, tiles
        return self.indices[places]


class _GroupInput(NamedTuple):
    """The input x of a group of linears: in the shape that products take, and what each run of tokens has made of it
    for each linear. `outputs`: those of each linear, if they were computed at once."""

    group: LinearGroup
    x: mx.array
    rows: mx.array
    changes: list[list[mx.array]]
    outputs: list[mx.array] | None = None


class ForwardContext:
    """Adds the product of each token's own adapter to the outputs of the linears, in one forward pass.

        single tokens, several slots   gather_mm picks each token's own factors
        tokens of one slot             plain products; a pass may hold several chunks, and single tokens beside them
        experts                        gather_mm picks the factors of each pair of a token's slot and an expert
        heads                          one product for each run of tokens, with copies of the factors if slots differ

    The input of a pass is [N, 1, in], or [1, T, in] for one row.

    Args:
        slots: the slot of each row.
        lengths: the number of tokens of each row.

    Attributes:
        rows: slots and lengths.
    """

    def __init__(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self.rows = self._slots, self._lengths = tuple(slots), tuple(lengths)
        self._used = frozenset(slots)
        self._last: _GroupInput | None = None
        self._parts: dict[tuple[int, int], ForwardContext] = {}

    def end(self) -> None:
        """Drops what belongs to one pass. What depends on slots and lengths alone stays, for the next pass."""
        self._last = None
        self._parts.clear()

    def adapt(self, group: LinearGroup, path: str, x: mx.array, base: BaseProduct) -> mx.array:
        """base(x) + (x A[slot]) B[slot] for the linear at `path`, with x [B, T, in]. B includes the scale."""
        if group.written.keys().isdisjoint(self._used):
            return base(x)
        place, last = group.places.get(path), self._last
        if last is None or last.x is not x or last.group is not group:
            last = self._last = self._input(group, x)
        if place is None:
            y = base(last.rows)
        elif last.outputs is not None:
            y = last.outputs[place]
        elif len(self._runs) == 1:
            y = self._runs[0].add(base(last.rows), last.changes[0], group, place)
        else:
            parts = mx.split(base(last.rows), [run.start for run in self._runs[1:]])
            ys = zip(self._runs, parts, last.changes, strict=True)
            y = mx.concatenate([run.add(part, change, group, place) for run, part, change in ys])
        if last.rows is x:
            return y
        return mx.unflatten(y, 0, x.shape[:-1]) if y.ndim == 2 else mx.reshape(y, (*x.shape[:-1], -1))

    def changes(self, groups: Iterable[LinearGroup]) -> bool:
        """See `AdapterContext.changes`."""
        return not all(group.written.keys().isdisjoint(self._used) for group in groups)

    def token_adapters(self) -> TokenAdapters:
        """See `AdapterContext.token_adapters`. The numbers are slots."""
        return self._token_slots

    def adapt_experts(self, group: LinearGroup, path: str, call: ExpertCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_experts`. Each linear of a group of experts has one tile."""
        place, last = group.places.get(path), self._last
        if place is None or group.written.keys().isdisjoint(self._used):
            return y
        pairs = call.experts * group.slots + call.adapters
        if last is None or last.x is not call.x or last.group is not group:
            h = _by_place(call.product(call.x, group.a.flatten(0, 1), pairs), group)
            last = self._last = _GroupInput(group, call.x, call.x, [h])
        tiles = pairs if len(group.tiles) == 1 else pairs * len(group.tiles) + place
        return y + call.product(last.changes[0][place], group.b.flatten(0, 2), tiles)

    def adapt_heads(self, group: LinearGroup, path: str, call: HeadsCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_heads`. The linear is the only one of its group."""
        if path not in group.places or group.written.keys().isdisjoint(self._used):
            return y
        starts = [run.start for run in self._runs[1:]]
        runs = zip(self._runs, mx.split(call.x, starts), mx.split(y, starts), strict=True)
        changed = [y + call.change(x, group.a[run.slots], group.b[run.slots].squeeze(1)) for run, x, y in runs]
        return mx.concatenate(changed)

    def part(self, start: int, stop: int) -> ForwardContext:
        """See `AdapterContext.part`. It is made once for all layers."""
        if (start, stop) not in self._parts:
            first, last = np.searchsorted(np.cumsum([0, *self._lengths]), [start, stop])
            self._parts[start, stop] = ForwardContext(self._slots[first:last], self._lengths[first:last])
        return self._parts[start, stop]

    @cached_property
    def _token_slots(self) -> TokenAdapters:
        slots = np.repeat(np.array(self._slots, np.uint32), self._lengths)
        return TokenAdapters(mx.array(slots), max(self._slots) + 1)

    @cached_property
    def _runs(self) -> tuple[_SameSlot | _OwnSlots, ...]:
        return _runs(self._slots, self._lengths)

    def _input(self, group: LinearGroup, x: mx.array) -> _GroupInput:
        if len(self._runs) == 1:
            run, rows = self._runs[0], self._runs[0].rows(x)
            if isinstance(run, _OwnSlots) and group.is_whole and (joined := group.joined) is not None:
                y = joined(rows) + run.whole_change(group, rows)
                return _GroupInput(group, x, rows, [], _by_tile(y, group))
            return _GroupInput(group, x, rows, [run.change(group, rows)])
        rows = mx.flatten(x, 0, -2)
        parts = zip(self._runs, mx.split(rows, [run.start for run in self._runs[1:]]), strict=True)
        return _GroupInput(group, x, rows, [run.change(group, run.rows(part)) for run, part in parts])


class OneAdapter:
    """Implements `AdapterContext`: the same adapter for every row, unpadded and outside the bank's slots."""

    def __init__(self, weights: AdapterWeights, dtype: mx.Dtype) -> None:
        self._pairs = {
            path: (mx.array(pair.a).astype(dtype), (mx.array(pair.b) * pair.scale).astype(dtype))
            for path, pair in weights.pairs.items()
        }

    def adapt(self, group: LinearGroup, path: str, x: mx.array, base: BaseProduct) -> mx.array:
        """base(x) + scale · (x a) b, with x [B, T, in] of the linear at `path`."""
        pair = self._pairs.get(path)
        return base(x) if pair is None else base(x) + (x @ pair[0]) @ pair[1]

    def changes(self, groups: Iterable[LinearGroup]) -> bool:
        """Whether the adapter changes a linear of these groups."""
        return any(path in self._pairs for group in groups for path in group.specs)

    def token_adapters(self) -> None:
        """Returns None: all tokens use the same adapter."""

    def part(self, start: int, stop: int) -> OneAdapter:
        """Returns itself: all tokens use the same adapter."""
        return self

    def adapt_experts(self, group: LinearGroup, path: str, call: ExpertCall, y: mx.array) -> mx.array:
        """As `adapt`, with the pair of each token's expert."""
        pair = self._pairs.get(path)
        if pair is None:
            return y
        return y + call.product(call.product(call.x, pair[0], call.experts), pair[1], call.experts)

    def adapt_heads(self, group: LinearGroup, path: str, call: HeadsCall, y: mx.array) -> mx.array:
        """As `adapt`, for a part of the linear's work."""
        pair = self._pairs.get(path)
        return y if pair is None else y + call.change(call.x, pair[0][None], pair[1][None])


def gathers() -> bool:
    """Whether `gather_mm` multiplies factors; otherwise they are copied for each part, and a plain product is made."""
    return _gathers(mx.default_device() == mx.gpu)


@cache
def _gathers(on_gpu: bool) -> bool:
    """Whether `gather_mm` gives the right products on the default device, which is tried once.

    With MLX 0.32 on CUDA it gives wrong ones if the matrices on the left are not consecutive in memory. It fails if one
    of them has more than 64 float32 rows, or if the width of the result is no multiple of 8.
    """
    count, rows, inner, width = 3, 65, 16, 12
    x = mx.random.normal((count, rows, 2 * inner), key=mx.random.key(0))[..., :inner]
    factors = mx.random.normal((count, inner, width), key=mx.random.key(1))
    chosen = mx.array([2, 0, 1], mx.uint32)
    try:
        right = mx.allclose(mx.gather_mm(x, factors, rhs_indices=chosen), x @ factors[chosen], 1e-2, 1e-2)
        return bool(right.item())
    except (RuntimeError, ValueError):
        return False


def _by_tile(y: mx.array, group: LinearGroup) -> list[mx.array]:
    """The parts of outputs for each linear of the group."""
    return list(mx.split(y, group.starts, -1)) if group.starts else [y]


def _by_place(h: mx.array, group: LinearGroup) -> list[mx.array]:
    """The parts of a product for each linear of the group."""
    return list(mx.split(h, len(group.places), axis=-1)) if len(group.places) > 1 else [h]


def _runs(slots: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[_SameSlot | _OwnSlots, ...]:
    """Single tokens with different slots become one run, which gathers each token's factors. Of the other tokens,
    neighbours with the same slot become one run."""
    mixed = len({slot for slot, length in zip(slots, lengths, strict=True) if length == 1}) > 1
    runs: list[_SameSlot | _OwnSlots] = []
    start = 0
    for (is_single, slot), group in groupby(
        zip(slots, lengths, strict=True), key=lambda row: (True, 0) if mixed and row[1] == 1 else (False, row[0])
    ):
        rows = list(group)
        if is_single:
            tokens = np.arange(len(rows), dtype=np.uint32)
            own = np.array([slot for slot, _ in rows], np.uint32)
            runs.append(_OwnSlots(start, mx.array(tokens), mx.array(own), gathers()))
        else:
            runs.append(_SameSlot(start, slot))
        start += sum(length for _, length in rows)
    return tuple(runs)
