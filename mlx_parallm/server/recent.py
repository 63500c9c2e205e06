"""What the server did in the last minutes: a short history of the device's work, percentiles of latencies, and who has
asked for how much."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.server.api.fields import WireOutput

KEPT_INTERVALS = 300
"""Intervals that are kept, of about a second each."""
WINDOW_S, MOST_VALUES = 60.0, 4096
"""Percentiles are of the values of so many seconds, and of at most so many."""

Counted = tuple[str, str, str]
"""What a counter counts: of a `key`, a `version` or a `status`; its name; and what of it."""


class Interval(WireOutput):
    """About a second of the history. It is longer when one unit of device work takes longer."""

    number: int
    """Counts intervals from 1, without gaps."""
    at: float
    """Unix time of its end, in seconds."""
    seconds: float
    """Its length."""
    decode: float
    """Seconds of device time in which tokens were drawn. A unit of work counts in the interval in which it ends."""
    prefill: float
    """Seconds of device time in which prompts were computed."""
    training: float
    """Seconds of device time of updates."""
    other: float
    """Seconds of device time in which adapters were copied into the bank, or a base model was loaded."""
    generated_tokens: int
    """Tokens generated."""
    prompt_tokens: int
    """Prompt tokens processed."""
    running: int
    """Sequences with a row, at its end."""
    waiting: int
    """Sequences without a row, at its end."""


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
    device = stats.device_seconds.minus(before.device_seconds)
    return Interval(
        number=number,
        at=round(at, 3),
        seconds=round(stats.taken_at - before.taken_at, 3),
        decode=round(device.decode, 3),
        prefill=round(device.prefill, 3),
        training=round(device.training, 3),
        other=round(device.other, 3),
        generated_tokens=stats.generation_tokens_total - before.generation_tokens_total,
        prompt_tokens=stats.prompt_tokens_total - before.prompt_tokens_total,
        running=stats.running,
        waiting=stats.waiting,
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
