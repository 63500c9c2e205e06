"""MemoryGuard decides what the server does about short memory: a step at a time, and a step back at a time."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.core.machine import Relief
from mlx_parallm.machine.memory import MemoryReading, Pressure

_STEP_S, _GIVING_STEP_S = 3.0, 30.0
"""Time for one step to take effect before the next one is taken: usually, and at most while memory is given back, which
is done between units of device work and takes longer on a slow device."""
_CALM_S = 10.0
"""Memory must have been enough for so long before a step is undone, so that the steps do not alternate."""
_ENOUGH = 0.95
"""Share of the limit below which the footprint counts as small enough again."""


@dataclass
class MemoryGuard:
    """`limit`: of this process' memory in bytes. `relief`: what is done now. `shortage`: why, for people; without
    figures, because clients without a key see it in `/health`."""

    limit: int
    relief: Relief = Relief.NONE
    shortage: str = ""
    _changed_at: float = -_STEP_S
    _needed_at: float = 0.0

    def update(self, reading: MemoryReading | None, idle: bool, now: float, giving: bool = False) -> None:
        """Takes in a reading.

        Args:
            reading: None: memory cannot be read. Then nothing is done.
            idle: no sequence has a row. Then a footprint above the limit is no reason to hold back anything but cached
                prefixes: the weights alone may be larger, and nothing would ever end that.
            now: seconds on a clock that does not jump.
            giving: what no row uses has not been given back yet.
        """
        if reading is None:
            self.relief, self.shortage = Relief.NONE, ""
            return
        wanted, needed = self._most(reading, idle, 1.0), self._most(reading, idle, _ENOUGH)
        if needed >= self.relief:
            self._needed_at = now
        step_s = _GIVING_STEP_S if giving and self.relief else _STEP_S
        if wanted > self.relief and now - self._changed_at >= step_s:
            self._change(Relief(self.relief + 1), now)
        elif needed < self.relief and now - self._needed_at >= _CALM_S:
            self._change(Relief(self.relief - 1), now)
        self.shortage = self._why(reading) or self.shortage if self.relief else ""

    def _change(self, relief: Relief, now: float) -> None:
        self.relief, self._changed_at, self._needed_at = relief, now, now

    def _most(self, reading: MemoryReading, idle: bool, share: float) -> Relief:
        """The furthest step that a reading is a reason for. `share`: of the limit that the process may take."""
        if reading.pressure is Pressure.CRITICAL:
            return Relief.REQUESTS
        if reading.footprint > share * self.limit:
            return Relief.PREFIXES if idle else Relief.REQUESTS
        return Relief.PREFIXES if reading.pressure is Pressure.WARNING else Relief.NONE

    def _why(self, reading: MemoryReading) -> str:
        if reading.footprint > self.limit:
            return "this process takes more than --memory-guard allows"
        if reading.pressure is Pressure.NORMAL:
            return ""
        return f"the system's memory pressure is {'critical' if reading.pressure is Pressure.CRITICAL else 'high'}"
