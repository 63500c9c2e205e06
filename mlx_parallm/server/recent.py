"""What the server did in the last minutes: a short history of the device's work, percentiles of latencies, and who has
asked for how much."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_parallm.core import DeviceSeconds, EngineStats

KEPT_INTERVALS = 300
"""Intervals that are kept, of about a second each."""
WINDOW_S, MOST_VALUES = 60.0, 4096
"""Percentiles are of the values of so many seconds, and of at most so many."""

Counted = tuple[str, str, str]
"""What a counter counts: of a `key`, a `version` or a `status`; its name; and what of it."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two snapshots of the engine.

    Attributes:
        number: counts intervals from 1, without gaps.
        at: Unix time of its end, in seconds.
        seconds: its length.
        device: how the device spent it. A unit of work counts in the interval in which it ends.
        generated_tokens, prompt_tokens: tokens drawn, and prompt tokens processed.
        running, waiting: sequences with a row and without one, at its end.
    """

    number: int
    at: float
    seconds: float
    device: DeviceSeconds
    generated_tokens: int
    prompt_tokens: int
    running: int
    waiting: int


class History:
    """The last intervals, oldest first. Used on the event loop's thread only; `add` is called once a second.

    Invariant: each interval begins where the one before it ended, so that their seconds add up to the time that passed.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._intervals: deque[Interval] = deque(maxlen=KEPT_INTERVALS)
        self._last: EngineStats | None = None
        self._count = 0

    def add(self, stats: EngineStats) -> None:
        """Ends an interval with this snapshot. Does nothing if the engine has taken no new one since the last call: it
        takes none inside a unit of work."""
        before = self._last
        if before is None or before.taken_at < stats.taken_at:
            self._last = stats
        if before is not None and before.taken_at < stats.taken_at:
            self._count += 1
            age = time.monotonic() - stats.taken_at
            self._intervals.append(_between(before, stats, self._count, self._now() - age))

    def after(self, number: int) -> Sequence[Interval]:
        """The intervals after this one; all that are kept, if there never was such a number."""
        return [each for each in self._intervals if each.number > number or number > self._count]


def _between(before: EngineStats, stats: EngineStats, number: int, at: float) -> Interval:
    return Interval(
        number,
        at,
        stats.taken_at - before.taken_at,
        stats.device_seconds.minus(before.device_seconds),
        stats.generation_tokens_total - before.generation_tokens_total,
        stats.prompt_tokens_total - before.prompt_tokens_total,
        stats.running,
        stats.waiting,
    )


class RecentValues:
    """The values of the last minute. Used on the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST_VALUES)  # when, and what

    def add(self, value: float) -> None:
        self._values.append((self._clock(), value))

    def ranked(self) -> list[float]:
        """The values, in ascending order."""
        since = self._clock() - WINDOW_S
        while self._values and self._values[0][0] < since:
            self._values.popleft()
        return sorted(value for _, value in self._values)


class RecentGrowth:
    """By how much counters have grown in the last minute. Used on the event loop's thread only; `add` is called once a
    second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._snapshots: deque[tuple[float, Counter[Counted]]] = deque()  # when, and the counters

    def add(self, counters: Counter[Counted]) -> None:
        now = self._clock()
        self._snapshots.append((now, counters))
        while self._snapshots[0][0] < now - WINDOW_S:
            self._snapshots.popleft()

    def until(self, counters: Counter[Counted]) -> Counter[Counted]:
        """Their growth from the oldest snapshot to these values, where it is above 0."""
        return counters - self._snapshots[0][1] if self._snapshots else +counters
