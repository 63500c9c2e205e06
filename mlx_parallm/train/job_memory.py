"""How much device memory a job takes that runs in parts, between which other work uses the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx


@dataclass(slots=True)
class JobMemory:
    """What the parts of one job have allocated, in bytes.

    Attributes:
        kept: what they have left allocated.
        most: the most that was allocated for the job at one time.
    """

    kept: int = 0
    most: int = 0

    @contextmanager
    def part(self) -> Iterator[None]:
        """Measures the part that runs in the block. It resets MLX's counter of the peak."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        try:
            yield
        finally:
            self.most = max(self.most, self.kept + mx.get_peak_memory() - before)
            self.kept += mx.get_active_memory() - before
