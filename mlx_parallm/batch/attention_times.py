"""Which attention of single tokens is faster on this device: dense, by blocks, or that of `paged_attention`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_parallm.batch.attention import AttentionCalls, AttentionChoice
from mlx_parallm.batch.block_attention import pairs_work
from mlx_parallm.batch.paged_attention import is_proved
from mlx_parallm.batch.spans import SeenBlocks
from mlx_parallm.kv.arena import Arena
from mlx_parallm.kv.blocks import blocks_for
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.layer_state import LayerSpec

Batch = tuple[int, int]
"""A number of rows, and the tokens of each."""

_BATCHES: tuple[Batch, ...] = ((1, 500), (4, 500), (16, 500), (2, 4000), (16, 4000))
_BATCHES_ON_CPU: tuple[Batch, ...] = ((1, 500), (4, 500), (8, 500))
_DECIDING: tuple[Batch, ...] = ((16, 500), (16, 4000))
"""Where the kernel must be faster."""
_LAYERS = 4
_LAYER_BYTES = 128 << 20
"""Layers of more are measured with one only. So many bytes do not fit any cache, so one is as slow as several."""
_CHAIN = 8
"""Layers that are launched, each with queries that depend on the one before, before the last one is waited for."""
_REPEATS = 5
_MARGIN = 1.1
"""Dense attention is used if it takes at most so many times as long, because it needs no index arrays."""
_TOLERANCE = 2e-3
"""Of the kernel's difference. Products of float32 are no more precise on a GPU that rounds them to TF32."""
_GROUP = 4
"""Query heads for each head of keys and values, as most models have."""
_PLAIN, _KERNEL, _DENSE = AttentionChoice(), AttentionChoice(kernel=True), AttentionChoice(math.inf)

_KERNEL_ERRORS = (RuntimeError, ValueError)
"""MLX's own: the GPU's compiler refuses a kernel, or its threads need more registers than there are."""


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Milliseconds of one layer's attention.

    dense, by_blocks: by the batch. `by_blocks` is empty if the device cannot.
    kernel: the same; empty if the kernel was not measured.
    difference: of the kernel's outputs from the others', relative to the largest of them, at most.
    tolerance: of `difference`; numbers of this type are not more precise.
    """

    dense: dict[Batch, float]
    by_blocks: dict[Batch, float]
    kernel: dict[Batch, float]
    difference: float = 0.0
    tolerance: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the kernel was measured, and gives what the others do."""
        return bool(self.kernel) and self.difference <= self.tolerance

    @property
    def is_faster(self) -> bool:
        """Whether the kernel is faster than attention by blocks where it must be."""
        return bool(self.kernel) and all(self.kernel[batch] < self.by_blocks[batch] for batch in _DECIDING)

    def choice(self, kernel: bool) -> AttentionChoice:
        """The faster calls. `kernel`: whether the kernel is one of them."""
        if not self.by_blocks:
            return _DENSE
        others, faster = self.kernel if kernel else self.by_blocks, 0
        for (rows, tokens), milliseconds in self.dense.items():
            if tokens != self._shortest or milliseconds > _MARGIN * others[rows, tokens]:
                break
            faster = rows
        return AttentionChoice(faster, kernel)

    @property
    def _shortest(self) -> int:
        return min(tokens for _, tokens in self.dense)

    def text(self, choice: AttentionChoice) -> str:
        """What was measured, and what follows."""
        if math.isinf(choice.dense_rows):
            return "each row alone: no gather_mm for this type here"
        others = "kernel" if choice.kernel else "by blocks"
        columns = [self.dense, self.by_blocks, *([self.kernel] if self.kernel else [])]
        names = " / ".join(("dense", "by blocks", "kernel")[: len(columns)])
        times = ", ".join(
            f"{rows} x {tokens} " + " / ".join(f"{column[rows, tokens]:.2f}" for column in columns)
            for rows, tokens in self.dense
        )
        agreement = f"; the kernel differs by {self.difference:.1e}" if self.kernel else ""
        return (
            f"dense up to {choice.dense_rows:.0f} rows, else {others} (ms a layer, {names}, for rows x tokens: {times}"
            f"{agreement})"
        )


def typical_attention() -> str:
    """What `typical_times` finds, and what a server would do."""
    times, failure = typical_times()
    uses_kernel = times.agrees and times.is_faster and is_proved()
    return times.text(times.choice(uses_kernel)) + (f"; the kernel fails: {failure}" if failure else "")


def typical_times() -> tuple[AttentionTimes, str]:
    """Those of a layer as many models of 8 billion parameters have it, in half-precision, but not on a CPU. See
    `attention_times`."""
    return attention_times(LayerSpec(8, 128, 128), mx.float32 if on_cpu() else mx.bfloat16, kernel=not on_cpu())


def attention_times(spec: LayerSpec, dtype: mx.Dtype, kernel: bool) -> tuple[AttentionTimes, str]:
    """The times of a layer, without the kernel if that cannot run; and why it cannot, or nothing."""
    try:
        return measure_attention(spec, dtype, kernel), ""
    except _KERNEL_ERRORS as error:  # if it is the device that fails, it fails again
        return measure_attention(spec, dtype, kernel=False), str(error)


def measure_attention(spec: LayerSpec, dtype: mx.Dtype, kernel: bool) -> AttentionTimes:
    """Measures layers of this shape, in up to half a second on a CPU. `kernel`: the kernel too.

    Raises:
        RuntimeError, ValueError: MLX cannot compile or run the kernel.
    """
    if not pairs_work(dtype):
        return AttentionTimes({}, {}, {})
    choices = [_DENSE, _PLAIN, *([_KERNEL] if kernel else [])]
    dense: dict[Batch, float] = {}
    by_blocks: dict[Batch, float] = {}
    in_kernel: dict[Batch, float] = {}
    differences = [0.0]
    for batch in _BATCHES_ON_CPU if on_cpu() else _BATCHES:
        measured = _Measured(spec, dtype, batch)
        for column, milliseconds in zip((dense, by_blocks, in_kernel), measured.milliseconds(choices), strict=False):
            column[batch] = milliseconds
        if kernel:
            differences.append(measured.difference(_KERNEL))
    return AttentionTimes(dense, by_blocks, in_kernel, max(differences), max(_TOLERANCE, 4 * mx.finfo(dtype).eps))


class _Measured:
    """A batch in a pool of its own, which has random numbers."""

    def __init__(self, spec: LayerSpec, dtype: mx.Dtype, batch: Batch) -> None:
        rows, tokens = batch
        blocks = blocks_for(tokens)
        self._seen = [SeenBlocks(range(row * blocks, (row + 1) * blocks), 0, tokens - 1) for row in range(rows)]
        self._arena = Arena([spec] * _LAYERS, dtype)
        if rows * blocks * self._arena.block_bytes > _LAYERS * _LAYER_BYTES:
            self._arena = Arena([spec], dtype)
        self._arena.resize(rows * blocks)
        for arrays in self._arena.keys, self._arena.values:
            arrays[:] = [mx.random.normal(array.shape, dtype, key=mx.random.key(7)) for array in arrays]
        self._queries = mx.random.normal(
            (rows, _GROUP * spec.kv_heads, 1, spec.head_dim_k), dtype, key=mx.random.key(8)
        )
        mx.eval(self._queries, self._arena.arrays())

    def milliseconds(self, choices: Sequence[AttentionChoice]) -> list[float]:
        """The least time of one layer with each of these, which take turns."""
        calls = [AttentionCalls(self._seen, None, choice) for choice in choices]
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(1 + _REPEATS):
            for call, taken in zip(calls, times, strict=True):
                started = time.perf_counter()
                for outputs in self._chain(call):
                    mx.async_eval(outputs)  # type: ignore[no-untyped-call]
                mx.synchronize()
                taken.append(1e3 * (time.perf_counter() - started) / _CHAIN)
        return [min(taken[1:]) for taken in times]

    def _chain(self, call: AttentionCalls) -> Iterator[mx.array]:
        queries = self._queries
        for layer in range(_CHAIN):
            outputs = self._attend(call, queries, layer % len(self._arena.keys))
            queries = self._queries + outputs[..., :1]
            yield queries

    def _attend(self, call: AttentionCalls, queries: mx.array, layer: int) -> mx.array:
        scale = queries.shape[-1] ** -0.5
        return call.attend(self._arena.keys[layer], self._arena.values[layer], queries, scale, None)

    def difference(self, choice: AttentionChoice) -> float:
        """How far outputs are from those by blocks, relative to the largest of these. Infinite if one is no number."""
        found, wanted = (
            self._attend(AttentionCalls(self._seen, None, each), self._queries, 0).astype(mx.float32)
            for each in (choice, _PLAIN)
        )
        largest = float(np.array(mx.abs(found - wanted).max() / mx.abs(wanted).max()))
        return math.inf if math.isnan(largest) else largest
