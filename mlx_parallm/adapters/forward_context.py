"""How a forward pass adds the product of each token's own adapter to what the linears give.

Adapted linears call the bank's `AdapterContext`. While requests are served it is a `ForwardContext`, which reads the
slots of the bank. Training has a class of its own, and so has a program that calls the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_parallm.adapters.linear_group import LinearGroup
from mlx_parallm.adapters.weights import AdapterWeights


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

    def adapt(self, group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """The output of the linear at `path`, with input x [B, T, in] and the base model's output y [B, T, out]."""

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
        experts                        gather_mm picks the factors of each pair of a token's slot and an expert
        heads                          one product for each run, with copies of the factors if slots differ

    A forward pass may hold single tokens and chunks. Its input is [N, 1, in], or [1, T, in] for one row.

    Args:
        slots: the slot of each row.
        lengths: the number of tokens of each row.
    """

    def __init__(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._rows = slots, lengths
        self._slots = frozenset(slots)
        self._last: tuple[LinearGroup, mx.array, list[mx.array]] | None = None
        self._parts: dict[tuple[int, int], ForwardContext] = {}

    def adapt(self, group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + (x A[slot]) B[slot] for the linear at `path`, with x [B, T, in], y [B, T, out]. B includes the scale."""
        place = group.places.get(path)
        if place is None or group.written.isdisjoint(self._slots):  # no adapter of these rows changes this linear
            return y
        return y + self._product(self._down(group, x)[place], group.b[path])

    def changes(self, groups: Iterable[LinearGroup]) -> bool:
        """See `AdapterContext.changes`."""
        return not all(group.written.isdisjoint(self._slots) for group in groups)

    def token_adapters(self) -> TokenAdapters:
        """See `AdapterContext.token_adapters`. The numbers are slots."""
        return self._token_slots

    def adapt_experts(self, group: LinearGroup, path: str, call: ExpertCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_experts`."""
        place = group.places.get(path)
        if place is None or group.written.isdisjoint(self._slots):
            return y
        pairs = call.experts * group.slots + call.adapters
        h = self._reused(group, call.x, lambda: call.product(call.x, group.a.flatten(0, 1), pairs))
        return y + call.product(h[place], group.b[path].flatten(0, 1), pairs)

    def adapt_heads(self, group: LinearGroup, path: str, call: HeadsCall, y: mx.array) -> mx.array:
        """See `AdapterContext.adapt_heads`."""
        if path not in group.places or group.written.isdisjoint(self._slots):
            return y
        starts = [run.start for run in self._runs[1:]]
        xs, ys = mx.split(call.x, starts), mx.split(y, starts)
        return mx.concatenate([
            y if run.slots is None else y + call.change(x, group.a[run.slots], group.b[path][run.slots])
            for run, x, y in zip(self._runs, xs, ys, strict=True)
        ])  # fmt: skip

    def part(self, start: int, stop: int) -> ForwardContext:
        """See `AdapterContext.part`. It is made once for all layers."""
        if (start, stop) not in self._parts:
            slots, lengths = self._rows
            first, last = np.searchsorted(np.cumsum([0, *lengths]), [start, stop])
            self._parts[start, stop] = ForwardContext(slots[first:last], lengths[first:last])
        return self._parts[start, stop]

    @cached_property
    def _token_slots(self) -> TokenAdapters:
        slots, lengths = self._rows
        return TokenAdapters(mx.array(np.repeat(np.array(slots, np.uint32), lengths)), max(slots) + 1)

    @cached_property
    def _runs(self) -> list[_Run]:
        return _runs(*self._rows)

    def _down(self, group: LinearGroup, x: mx.array) -> list[mx.array]:
        """x A[slot] of each linear of the group, [B, T, rank]."""
        return self._reused(group, x, lambda: self._product(x, group.a))

    def _reused(self, group: LinearGroup, x: mx.array, product: Callable[[], mx.array]) -> list[mx.array]:
        """The parts of a product for each linear of the group. It is computed once for linears with the same input."""
        last = self._last
        if last is None or last[0] is not group or last[1] is not x:
            h, places = product(), len(group.places)
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


class OneAdapter:
    """Implements `AdapterContext`: the same adapter for every row, unpadded and outside the bank's slots."""

    def __init__(self, weights: AdapterWeights, dtype: mx.Dtype) -> None:
        self._pairs = {
            path: (mx.array(pair.a).astype(dtype), (mx.array(pair.b) * pair.scale).astype(dtype))
            for path, pair in weights.pairs.items()
        }

    def adapt(self, group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + scale · (x a) b, x [B, T, in] and y [B, T, out] of the linear at `path`."""
        pair = self._pairs.get(path)
        return y if pair is None else y + (x @ pair[0]) @ pair[1]

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
    """Whether `gather_mm` multiplies factors; otherwise they are copied for each part, and a plain product is made.

    With MLX 0.32 on CUDA, `gather_mm` gives wrong products if the matrices on the left are not consecutive in memory.
    It fails if one of them has more than 64 float32 rows, or if the width of the result is no multiple of 8.
    """
    return not mx.cuda.is_available()


def _gathered(x: mx.array, run: _Run, factors: mx.array) -> mx.array:
    if run.slots is None:
        return mx.zeros((1, x.size // x.shape[-1], factors.shape[-1]), x.dtype)
    parts = x.reshape(run.batch, -1, x.shape[-1])
    if gathers():
        products = mx.gather_mm(parts, factors, lhs_indices=run.parts, rhs_indices=run.slots)
    else:
        products = parts @ factors[run.slots]
    return products.reshape(1, -1, factors.shape[-1])


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
