"""Arithmetic over [R, V] whose result for one row does not depend on which rows stand beside it.

Every reduction here runs along a row in a fixed order (sums by blocks of `BLOCK`), so a row taken
into a smaller batch gives the same bits on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.model.device import on_cpu

BLOCK = 64
"""Tokens summarised together. Divides most vocabularies, so that most need no padding."""


@dataclass(frozen=True, slots=True)
class RowSubset:
    """The rows of a batch that one stage works on. `index` int32 [n], or None: every row."""

    index: mx.array | None

    @classmethod
    def of(cls, chosen: Sequence[int], rows: int) -> RowSubset:
        """Rows `chosen` of `rows`, ascending. Taking all of them copies nothing."""
        return cls(None if len(chosen) == rows else mx.array(list(chosen), mx.int32))

    def take(self, batch: mx.array) -> mx.array:
        """[R, ...] → [n, ...]."""
        return batch if self.index is None else batch[self.index]

    def put(self, part: mx.array, batch: mx.array) -> mx.array:
        """A copy of `batch` [R, ...] with the subset's rows replaced by `part` [n, ...]."""
        if self.index is None:
            return part
        merged = mx.array(batch)
        merged[self.index] = part
        return merged


def exp(x: mx.array) -> mx.array:
    """e**x in fp32, for x <= 0. On MLX's CPU `power` is 2.5 times as fast as `exp`, and a little more exact."""
    return mx.power(math.e, x) if on_cpu() else mx.exp(x)


def keep_from(weights: mx.array, floor: mx.array) -> mx.array:
    """Finite weights [R, V] with those below `floor` [R, 1] at 0. A product: `where` branches, five times as slow."""
    return weights * (weights >= floor)


def in_blocks(x: mx.array, fill: float) -> mx.array:
    """[R, V] → [R, ceil(V / BLOCK), BLOCK], the last block filled up with `fill`."""
    missing = -x.shape[-1] % BLOCK
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)], constant_values=fill)
    return x.reshape(x.shape[0], -1, BLOCK)


def row_sum(x: mx.array) -> mx.array:
    """[R, V] → [R, 1]."""
    return in_blocks(x, 0.0).sum(-1).sum(-1, keepdims=True)
