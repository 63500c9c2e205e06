"""How device time is shared, and how it was."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mlx_parallm.core.requests import WorkClass

MODE_SHARES: Mapping[str, float] = {"inference_and_training": 0.12, "training_priority": 0.5}
"""Mode of a server that does both → its `training_time_share`, where none is given."""


class PauseMode(StrEnum):
    """What becomes of the requests under way when the engine pauses; the values are vLLM's."""

    ABORT = "abort"
    """They fail at once."""
    WAIT = "wait"
    """They go on to their end."""
    KEEP = "keep"
    """They stand still, and go on when the pause is over."""


@dataclass(frozen=True, slots=True)
class DeviceSchedule:
    """What requests and training get of the device. A new one takes effect between two units of device work.

    `training_time_share`: in (0, 1], of device time, for micro-steps while rows decode; idle time is all theirs.
    `max_decode_stall_s`: seconds of other work put between two decode steps, > 0. Units of prefill and of training are
    sized to it by prediction and are not interrupted. The least of training is one layer of one sample, the least of
    prefill 16 tokens, and a prompt gets a chunk every few steps whatever is predicted; a stall can be as much longer.
    `row_shares`: of each class, summing to 1: of the places in the batch while both classes wait, and of the rows
    in a decode step while rows of both are there. A class alone has all.
    """

    training_time_share: float = MODE_SHARES["inference_and_training"]
    max_decode_stall_s: float = 0.5
    row_shares: Mapping[WorkClass, float] = field(
        default_factory=lambda: {WorkClass.INFERENCE: 0.7, WorkClass.TRAINING: 0.3}
    )


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts`: of values at most as large as each of `bounds`, which ascend, and above the one before; the last
    count is of those above all. `total`: their sum. `largest`: of them, 0.0 before any."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, *bounds: float) -> Histogram:
        """An empty one."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def with_value(self, value: float) -> Histogram:
        """The same and one value more."""
        at = bisect_left(self.bounds, value)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Histogram(self.bounds, counts, self.total + value, max(self.largest, value))


DECODE_GAPS = Histogram.of(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
"""Seconds between two decode steps while rows wait for the second."""

TRAINING_SHARES = Histogram.of(0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Of device time, for training, in each window in which it and rows wanted it throughout."""
