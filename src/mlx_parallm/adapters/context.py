"""Which adapter each token of one forward uses.

decode, mixed     [n, 1, in]     one slot a row: gather_mm picks each row's own factors
decode, alike     [n, 1, in]     one slot for all: one dense product
prefill           [1, T, in]     one row, one slot: one dense product
packed prefill    [T, 1, in]     runs of tokens with one slot each: a dense product a run, never a gather a token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from mlx_parallm.adapters.bank import LinearGroup


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens [start, stop) of the flattened batch; `slots` has one index for each of `batch` equal parts of them."""

    start: int
    stop: int
    batch: int
    slots: mx.array | None
    """None: all on the base."""


class ForwardContext:
    """One forward's rows: the slot of each, and how many tokens it has. Made for one forward, then dropped."""

    def __init__(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._runs = _runs(slots, lengths)
        self._last: tuple[LinearGroup, mx.array, list[mx.array]] | None = None

    def adapt(self, group: LinearGroup, path: str, x: mx.array, y: mx.array) -> mx.array:
        """y + scale · (x A[slot]) B[slot], x [B, T, in] and y [B, T, out] of the linear at `path`."""
        place = group.places.get(path)
        if place is None:  # no adapter in the bank changes this linear
            return y
        return y + self._product(self._down(group, x)[place], group.b[path])

    def _down(self, group: LinearGroup, x: mx.array) -> list[mx.array]:
        """x A[slot] of each linear, [B, T, rank], once for the linears of a group that are given the same array."""
        last = self._last
        if last is None or last[0] is not group or last[1] is not x:
            h = self._product(x, group.a)
            places = len(group.places)
            last = self._last = (group, x, list(mx.split(h, places, axis=-1)) if places > 1 else [h])
        return last[2]

    def _product(self, x: mx.array, factors: mx.array) -> mx.array:
        """[B, T, k] by [slots, k, m] → [B, T, m]."""
        shape = (*x.shape[:-1], factors.shape[-1])
        if len(self._runs) == 1:
            return _gathered(x, self._runs[0], factors).reshape(shape)
        rows = x.reshape(1, -1, x.shape[-1])
        parts = [_gathered(rows[:, run.start : run.stop], run, factors) for run in self._runs]
        return mx.concatenate(parts, axis=1).reshape(shape)


def forward_context(slots: Sequence[int], lengths: Sequence[int]) -> ForwardContext | None:
    """None when every row is on the base."""
    return ForwardContext(slots, lengths) if any(slots) else None


def _gathered(x: mx.array, run: _Run, factors: mx.array) -> mx.array:
    if run.slots is None:
        return mx.zeros((1, run.stop - run.start, factors.shape[-1]), x.dtype)
    return mx.gather_mm(x.reshape(run.batch, -1, x.shape[-1]), factors, rhs_indices=run.slots)


def _runs(slots: Sequence[int], lengths: Sequence[int]) -> list[_Run]:
    mixed = len(set(slots)) > 1
    if mixed and set(lengths) == {1}:
        return [_Run(0, len(slots), len(slots), mx.array(list(slots), mx.uint32))]
    runs: list[_Run] = []
    start = 0
    for slot, rows in groupby(zip(slots, lengths, strict=True), key=lambda row: row[0]):
        stop = start + sum(length for _, length in rows)
        runs.append(_Run(start, stop, 1, mx.array([slot], mx.uint32) if slot else None))
        start = stop
    return runs
