"""How a forward pass adds the product of each token's own adapter to what the linears give.

Adapted linears call the bank's `AdapterContext`. While requests are served it is a `ForwardContext`, which reads the
slots of the bank. Training has a class of its own, and so has a program that calls the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

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

    def rows(self, x: mx.array) -> mx.array:
        """x [..., in] in the shape that products take: [tokens, in]."""
        return x.reshape(-1, x.shape[-1])

    def down(self, group: LinearGroup, x: mx.array) -> list[mx.array]:
        """x A of each linear of the group, [tokens, rank]; nothing if the slot's adapter changes none of them."""
        if self.slot not in group.written:
            return []
        h, places = x @ group.factors(self.slot)[0], len(group.places)
        if len(h) == 1 and places > 1:  # Metal copies a vector that is a part of a longer row
            return list(mx.split(h.reshape(places, -1), places))
        return _by_place(h, group)

    def add(self, y: mx.array, h: list[mx.array], group: LinearGroup, path: str) -> mx.array:
        """y + h B, with h of `down`."""
        return mx.addmm(y, h[group.places[path]], group.factors(self.slot)[1][path]) if h else y


@dataclass(frozen=True, slots=True)
class _OwnSlots:
    """Single tokens from `start` on, each of its own slot: `slots`, uint32 [tokens]. `gathers`: see the function.
    `numbers`: what `_numbers` has made."""

    start: int
    slots: mx.array
    gathers: bool
    numbers: dict[tuple[int, int], mx.array] = field(default_factory=dict)

    def rows(self, x: mx.array) -> mx.array:
        """x [..., in] in the shape that products take: [tokens, 1, in]."""
        return x if x.ndim == 3 and x.shape[1] == 1 else x.reshape(len(self.slots), 1, x.shape[-1])

    def down(self, group: LinearGroup, x: mx.array) -> mx.array:
        """x A[slot] of each linear of the group, [tokens · places, 1, rank]: each vector is whole in memory, because
        Metal copies one that is a part of a longer row."""
        h = self._product(self.rows(x), self._numbers(1, 0), group.a)
        return h.reshape(-1, 1, group.rank) if len(group.places) > 1 else h

    def add(self, y: mx.array, h: mx.array, group: LinearGroup, path: str) -> mx.array:
        """y + h B[slot], with h of `down`."""
        numbers = self._numbers(len(group.places), group.places[path])
        product = self._product(h, numbers, group.b[path])
        return y + (product if y.ndim == 3 else product.reshape(y.shape))

    def _product(self, x: mx.array, numbers: mx.array, factors: mx.array) -> mx.array:
        """The vectors of x [n, 1, k] with these numbers, one for each token, times the factors [slots, k, m] of each
        token's slot."""
        if self.gathers:
            return mx.gather_mm(x, factors, numbers, self.slots)
        return x[numbers] @ factors[self.slots]

    def _numbers(self, places: int, place: int) -> mx.array:
        """The numbers of each token's vector at this place, where each token has so many vectors: uint32 [tokens]."""
        if (places, place) not in self.numbers:
            each = np.arange(place, places * len(self.slots), places, dtype=np.uint32)
            self.numbers[places, place] = mx.array(each)
        return self.numbers[places, place]


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
    """

    def __init__(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._slots, self._lengths = tuple(slots), tuple(lengths)
        self._used = frozenset(slots)
        self._last: tuple[LinearGroup, mx.array, Any] | None = None  # a group, its input, and what `_down` made of it
        self._parts: dict[tuple[int, int], ForwardContext] = {}

    def adapt(self, group: LinearGroup, path: str, x: mx.array, base: BaseProduct) -> mx.array:
        """base(x) + (x A[slot]) B[slot] for the linear at `path`, with x [B, T, in]. B includes the scale."""
        if path not in group.places or group.written.isdisjoint(self._used):
            return base(x)
        last = self._last
        if last is None or last[0] is not group or last[1] is not x:
            last = self._last = (group, x, self._down(group, x))
        rows, h = last[2]
        y, runs = base(rows), self._runs
        if len(runs) == 1:
            y = runs[0].add(y, h[0], group, path)
        else:
            ys = mx.split(y, [run.start for run in runs[1:]])
            y = mx.concatenate([run.add(y, h, group, path) for run, y, h in zip(runs, ys, h, strict=True)])
        return y if rows is x else y.reshape(*x.shape[:-1], y.shape[-1])

    def changes(self, groups: Iterable[LinearGroup]) -> bool:
        """See `AdapterContext.changes`."""
        return not all(group.written.isdisjoint(self._used) for group in groups)

    def token_adapters(self) -> TokenAdapters:
        """See `AdapterContext.token_adapters`. The numbers are slots."""
        return self._token_slots

    def adapt_experts(self, group: LinearGroup, path: str, call: ExpertCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_experts`."""
        if path not in group.places or group.written.isdisjoint(self._used):
            return y
        pairs = call.experts * group.slots + call.adapters
        last = self._last
        if last is None or last[0] is not group or last[1] is not call.x:
            h = _by_place(call.product(call.x, group.a.flatten(0, 1), pairs), group)
            last = self._last = (group, call.x, h)
        return y + call.product(last[2][group.places[path]], group.b[path].flatten(0, 1), pairs)

    def adapt_heads(self, group: LinearGroup, path: str, call: HeadsCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_heads`."""
        if path not in group.places or group.written.isdisjoint(self._used):
            return y
        starts = [run.start for run in self._runs[1:]]
        xs, ys = mx.split(call.x, starts), mx.split(y, starts)
        return mx.concatenate([
            y + call.change(x, group.a[slots], group.b[path][slots])
            for slots, x, y in zip(map(_slots_of, self._runs), xs, ys, strict=True)
        ])  # fmt: skip

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

    def _down(self, group: LinearGroup, x: mx.array) -> tuple[mx.array, list[Any]]:
        """x in the shape that products take, and x A[slot] of each run, for each linear of the group."""
        if len(self._runs) == 1:
            rows = self._runs[0].rows(x)
            return rows, [self._runs[0].down(group, rows)]
        rows = x.reshape(-1, x.shape[-1])
        parts = mx.split(rows, [run.start for run in self._runs[1:]])
        return rows, [run.down(group, part) for run, part in zip(self._runs, parts, strict=True)]


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


def _by_place(h: mx.array, group: LinearGroup) -> list[mx.array]:
    """The parts of a product for each linear of the group."""
    return list(mx.split(h, len(group.places), axis=-1)) if len(group.places) > 1 else [h]


def _slots_of(run: _SameSlot | _OwnSlots) -> mx.array:
    return run.slots if isinstance(run, _OwnSlots) else mx.array([run.slot], mx.uint32)


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
            runs.append(_OwnSlots(start, mx.array([slot for slot, _ in rows], mx.uint32), gathers()))
        else:
            runs.append(_SameSlot(start, slot))
        start += sum(length for _, length in rows)
    return tuple(runs)
