"""What became of the schedule: how long rows waited between two steps, and how much of the device training had."""

from __future__ import annotations

from mlx_parallm.core.schedule import DECODE_GAPS, TRAINING_SHARES, Histogram

_WINDOW_S = 10.0


class GapMeter:
    """Seconds from one decode step to the next, where rows were there for both."""

    def __init__(self) -> None:
        self.gaps: Histogram = DECODE_GAPS

    def stepped(self, seconds: float) -> None:
        self.gaps = self.gaps.with_value(seconds)


class ShareMeter:
    """Training's share of device time, window by window.

    `last`: of the last window. `shares`: of those in which rows were there and training waited all the time.
    """

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self.last = 0.0
        self.shares: Histogram = TRAINING_SHARES
        self._window_s = window_s
        self._began: float | None = None
        self._trained = 0.0
        self._contended = True

    def see(self, now: float, contended: bool) -> None:
        """Whether rows and training both want the device now. Ask whenever a unit is picked."""
        if self._began is None:
            self._began = now
        self._contended = self._contended and contended
        if now - self._began < self._window_s:
            return
        self.last = self._trained / (now - self._began)
        if self._contended:
            self.shares = self.shares.with_value(self.last)
        self._began, self._trained, self._contended = now, 0.0, True

    def ran(self, seconds: float) -> None:
        self._trained += seconds
