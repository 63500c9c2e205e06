"""Measures how single tokens attend faster on this device: each row alone to dense keys, or all rows by blocks.

Dense attention of a row is one fused kernel on a GPU. Attention by blocks takes five kernels for any number of rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mlx_parallm.batch.attention_calls import AttentionCalls
from mlx_parallm.batch.block_attention import pairs_work
from mlx_parallm.batch.spans import RowBlocks
from mlx_parallm.kv.arena import Arena
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.layer_state import LayerSpec

_ROWS = (1, 4, 8)
_TOKENS, _BLOCKS = 500, 8
"""The length of each row, in tokens and in blocks."""
_LAYERS = 4
_REPEATS = 5
_MARGIN = 1.1
"""Dense attention is used if it takes at most so many times as long, because it needs no index arrays."""
_GROUP = 4
"""Query heads for each head of keys and values, as most models have."""


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Milliseconds of one layer's attention, for some numbers of rows of 500 tokens."""

    dense: dict[int, float]
    by_blocks: dict[int, float]

    @property
    def dense_rows(self) -> float:
        """Up to how many rows dense attention is faster, as far as measured; 0 if it is not faster for one row.
        Infinite if the device cannot attend by blocks."""
        if not self.by_blocks:
            return math.inf
        faster = 0
        for rows, milliseconds in self.dense.items():
            if milliseconds > _MARGIN * self.by_blocks[rows]:
                break
            faster = rows
        return faster

    @property
    def text(self) -> str:
        if not self.by_blocks:
            return "each row alone: no gather_mm for this type here"
        times = (f"{rows} {self.dense[rows]:.2f} / {self.by_blocks[rows]:.2f}" for rows in self.dense)
        return f"dense up to {self.dense_rows} rows (ms a layer, dense / by blocks, for rows: {', '.join(times)})"


def typical_attention() -> AttentionTimes:
    """The times of a layer as many models of 8 billion parameters have it. In half-precision, but not on a CPU."""
    return measure_attention(LayerSpec(8, 128, 128), mx.float32 if on_cpu() else mx.bfloat16)


def measure_attention(spec: LayerSpec, dtype: mx.Dtype) -> AttentionTimes:
    """Measures layers of this shape, in up to half a second on a CPU."""
    if not pairs_work(dtype):
        return AttentionTimes({}, {})
    arena = _filled_arena(spec, dtype)
    dense, by_blocks = {}, {}
    for count in _ROWS:
        rows = [RowBlocks(range(row * _BLOCKS, (row + 1) * _BLOCKS), 0, _TOKENS - 1) for row in range(count)]
        queries = mx.random.normal((count, _GROUP * spec.kv_heads, 1, spec.head_dim_k)).astype(dtype)
        alone, together = (AttentionCalls(rows, None, dense_rows) for dense_rows in (math.inf, 0))
        dense[count], by_blocks[count] = _milliseconds([
            partial(_attend, calls, arena, queries) for calls in (alone, together)
        ])  # fmt: skip
    return AttentionTimes(dense, by_blocks)


def _attend(calls: AttentionCalls, arena: Arena, queries: mx.array, layer: int) -> mx.array:
    return calls.attend(arena.keys[layer], arena.values[layer], queries, 1.0, None)


def _filled_arena(spec: LayerSpec, dtype: mx.Dtype) -> Arena:
    arena = Arena([spec] * _LAYERS, dtype)
    arena.resize(max(_ROWS) * _BLOCKS)
    return arena


def _milliseconds(attentions: Sequence[Callable[..., mx.array]]) -> list[float]:
    """The least time of one layer for each of these, which take turns."""
    times: list[list[float]] = [[] for _ in attentions]
    for _ in range(1 + _REPEATS):
        for attend, taken in zip(attentions, times, strict=True):
            started = time.perf_counter()
            mx.eval([attend(layer=layer) for layer in range(_LAYERS)])
            taken.append(1e3 * (time.perf_counter() - started) / _LAYERS)
    return [min(taken[1:]) for taken in times]
