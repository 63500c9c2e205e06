"""How much memory a unit of training takes while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

_UNITS = 32


class Footprint:
    """Device thread only, but for `peak`. Measuring resets MLX's own peak."""

    def __init__(self) -> None:
        self._peak = 0
        self._rises: deque[int] = deque(maxlen=_UNITS)

    @property
    def peak(self) -> int:
        """The most that MLX has held, in bytes."""
        return max(self._peak, mx.get_peak_memory())

    @property
    def working(self) -> int:
        """Bytes: the most that one of the last units held beside what was there before it or was left after it."""
        return max(self._rises, default=0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures what runs in the block, unless it raises."""
        self._peak = self.peak
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        yield
        peak = mx.get_peak_memory()
        self._rises.append(max(peak - max(before, mx.get_active_memory()), 0))
