"""How much memory a micro-step of training takes while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

_MICRO_STEPS = 16


class Footprint:
    """Device thread only, but for `peak`. Measuring resets MLX's own peak.

    A micro-step is several units, between which others use the device: what a unit leaves is counted with it.
    """

    def __init__(self) -> None:
        self._peak = 0
        self._rises: deque[int] = deque(maxlen=_MICRO_STEPS)
        self._left = self._most = 0

    @property
    def peak(self) -> int:
        """The most that MLX has held, in bytes."""
        return max(self._peak, mx.get_peak_memory())

    @property
    def working(self) -> int:
        """Bytes: the most that one of the last micro-steps, or this one, held beside what it leaves."""
        return max(self._most, *self._rises, 0)

    def begin(self) -> None:
        """A micro-step."""
        self._left = self._most = 0

    def end(self) -> None:
        """It is over, or was given up."""
        self._rises.append(max(self._most - max(self._left, 0), 0))
        self._most = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures one unit of it, which runs in the block."""
        self._peak = self.peak
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        try:
            yield
        finally:
            self._most = max(self._most, self._left + mx.get_peak_memory() - before)
            self._left += mx.get_active_memory() - before
