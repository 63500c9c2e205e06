"""TakingTurns: several works that share the device time of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mlx_parallm.core.device import TrainingWork


class TakingTurns:
    """Implements `core.TrainingWork` by several others: each unit is one of the next of them that has work. Device
    thread only, except `peak_bytes`."""

    def __init__(self, works: Sequence[TrainingWork]) -> None:
        self._works = tuple(works)
        self._next = deque(works)
        self._last: TrainingWork | None = None

    def waits(self) -> bool:
        return any(work.waits() for work in self._works)

    def pace(self, seconds: float) -> None:
        """See `core.TrainingWork.pace`."""
        for work in self._works:
            work.pace(seconds)

    def advance(self) -> None:
        """Runs one unit of the first work that has one. Then it is the last in the queue."""
        for work in tuple(self._next):
            self._next.rotate(-1)
            if work.waits():
                self._last = work
                work.advance()
                return

    def reset(self) -> None:
        """Resets the work whose unit was the last one."""
        if self._last is not None:
            self._last.reset()

    @property
    def bytes_held(self) -> int:
        return sum(work.bytes_held for work in self._works)

    @property
    def bytes_of_updates(self) -> int:
        """Units of all works may have kept arrays for their next ones."""
        return sum(work.bytes_of_updates for work in self._works)

    @property
    def peak_bytes(self) -> int:
        return max(work.peak_bytes for work in self._works)
