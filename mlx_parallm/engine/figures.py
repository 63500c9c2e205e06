"""What an engine counts, as everybody may read it. This module does not import MLX."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.machine import UNKNOWN_MACHINE, MachineState
from mlx_parallm.errors import DeviceHungError, EngineDeadError


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by size, like a Prometheus histogram whose buckets are not cumulative.

    `counts[i]` is the number of values in (bounds[i-1], bounds[i]]; the last count is of values above all bounds.
    `total` is the sum of the values, `largest` the largest of them, or 0.0.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, *bounds: float) -> Histogram:
        """An empty histogram with these bounds, in ascending order."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def with_value(self, value: float) -> Histogram:
        """A copy with one more value."""
        at = bisect_left(self.bounds, value)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Histogram(self.bounds, counts, self.total + value, max(self.largest, value))

    def plus(self, other: Histogram) -> Histogram:
        """The values of both, which have the same bounds."""
        counts = tuple(ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True))
        return Histogram(self.bounds, counts, self.total + other.total, max(self.largest, other.largest))


@dataclass(frozen=True, slots=True)
class DeviceSeconds:
    """Seconds that the device has spent on each kind of work. It was idle for the rest of the time.

    Attributes:
        decode, prefill: forward passes. If one samples tokens and computes prompts too, its time is divided as the cost
            model predicts.
        training: parts of updates, also of those that failed.
        other: copying adapters into the bank, and loading further base models.
    """

    decode: float = 0.0
    prefill: float = 0.0
    training: float = 0.0
    other: float = 0.0

    def plus(self, more: DeviceSeconds) -> DeviceSeconds:
        """The seconds of both."""
        return DeviceSeconds(
            self.decode + more.decode,
            self.prefill + more.prefill,
            self.training + more.training,
            self.other + more.other,
        )

    def minus(self, earlier: DeviceSeconds) -> DeviceSeconds:
        """The seconds since `earlier`."""
        return DeviceSeconds(
            self.decode - earlier.decode,
            self.prefill - earlier.prefill,
            self.training - earlier.training,
            self.other - earlier.other,
        )


NO_TIME = DeviceSeconds()

DECODE_GAPS = Histogram.of(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
"""Seconds from the end of one decode step to the end of the next one, for which rows waited."""

TRAINING_SHARES = Histogram.of(0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Training's share of device time in time windows in which training and rows both had work throughout."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of counters and gauges, taken without stopping the engine. Names ending in `_total` only grow.

    Attributes:
        kv_bytes_held, kv_bytes_budget: the memory of the KV pool that rows hold, and the pool's limit.
        kv_bytes_cached: the memory of cached prefixes that no row uses. It is not part of `kv_bytes_held`, because rows
            get it when they need it.
        kv_block_tokens, kv_blocks: tokens of a block of the KV pool, and the blocks that fit its limit.
        memory_bytes: device memory by what it is held for; see `kv.device_memory.MemoryAccount`.
        prefix_cache_queries_total, prefix_cache_hits_total: prompt tokens that were looked up in the prefix cache, and
            those whose keys and values were taken from it. They count as `RequestFinished.cached_tokens` does.
        external_prefix_cache_queries_total, external_prefix_cache_hits_total: prompt tokens that were looked up on the
            disk because the prefix cache did not have them, and those that were read back into it.
        draft_tokens_total, accepted_draft_tokens_total: tokens of drafts that were computed, and those that were right.
        training_share: training's share of device time in the last time window, with or without rows waiting.
        device_seconds: what the device has worked on since start.
        taken_at: when the snapshot was taken, on the monotonic clock.
        paused: `pause` was called and `resume` was not. Requests may still be running.
        machine: what is known of the machine, and what is done about it.
        stuck: what the device thread does, if it takes suspiciously long, as a sentence; empty otherwise.
        detail: JSON values for `/debug/state`.
        bases: the same of each base model by its name, if there are several.
    """

    alive: bool
    ready: bool
    running: int = 0
    waiting: int = 0
    kv_bytes_held: int = 0
    kv_bytes_budget: int = 0
    kv_bytes_cached: int = 0
    kv_tokens_used: int = 0
    kv_block_tokens: int = 0
    kv_blocks: int = 0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    external_prefix_cache_queries_total: int = 0
    external_prefix_cache_hits_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0
    aborted_total: int = 0
    failed_steps_total: int = 0
    schedule: DeviceSchedule = field(default_factory=DeviceSchedule)
    decode_gaps: Histogram = DECODE_GAPS
    training_shares: Histogram = TRAINING_SHARES
    training_share: float = 0.0
    device_seconds: DeviceSeconds = NO_TIME
    taken_at: float = 0.0
    paused: bool = False
    machine: MachineState = UNKNOWN_MACHINE
    stuck: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    bases: Mapping[str, EngineStats] = field(default_factory=dict)

    def check_works(self) -> None:
        """Raises EngineDeadError: the device thread is not running, or seems to hang."""
        if self.stuck:
            raise DeviceHungError(self.stuck)
        if not self.alive:
            raise EngineDeadError("the device thread is not running")
