"""How many cores other programs leave, and a BLAS with as many threads as that.

A product that is split among threads ends when the last of them was given a core. Beside programs that use all cores a
small one takes three times as long with two threads as with one, and on a quiet machine two thirds as long
(`benchmarks/studies/busy.py`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import mlx_parallm
from mlx_parallm.blas import Blas

_STAT = Path("/proc/stat")
_SHORTEST_S = 0.25
"""The kernel counts in hundredths of a second, so less would say little."""
_LONGEST_S = 5.0
"""A longer time says nothing about now: the process was stopped meanwhile, or the machine slept."""

_log = logging.getLogger(__name__)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class OtherPrograms:
    """The use that other processes make of the cores of this one; its children count among the others. On Linux."""

    def __init__(self) -> None:
        self._last = _reading()

    def cores(self) -> float:
        """The cores that they keep busy, since the call before if that was not long ago. At most a quarter of a second
        is waited for. Raises OSError: the system does not say."""
        if time.monotonic() - self._last[0] > _LONGEST_S:
            self._last = _reading()
        time.sleep(max(0.0, self._last[0] + _SHORTEST_S - time.monotonic()))
        (since, used, own), self._last = self._last, _reading()
        now, used_now, own_now = self._last
        return max(0.0, (used_now - used) - (own_now - own)) / (now - since)


def _reading() -> tuple[float, float, float]:
    """The clock, the time that all processes used on our cores, and what this one used of it; seconds."""
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
    # user, nice, system, [idle, iowait,] irq, softirq, steal: see proc_stat(5).
    ticks = sum(int(tick) for name, *all_ticks in lines if name in ours for tick in all_ticks[:3] + all_ticks[5:8])
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


class BlasThreads:
    """The threads of this process' BLAS. Their number changes the last bits of a product.

    Attributes:
        most: one for each core; 0 if their number cannot be set, or the environment says it.
        count: those in use; 0 as above.
    """

    def __init__(self, blas: Blas | None = None, others: Callable[[], float] | None = None) -> None:
        """`others`: cores that other programs use; None: those of this machine."""
        set_threads = (blas or mlx_parallm.BLAS).set_threads
        can_read = others is not None or _STAT.exists()
        self.most = usable_cores() if set_threads is not None and can_read else 0
        self._set: Callable[[int], object] = set_threads or (lambda count: None)
        self._others = others or (OtherPrograms().cores if self.most else lambda: 0.0)
        self.count = self.most

    def adapt(self) -> None:
        """Leaves other programs the cores that they use, but one. Raises OSError: the system does not say."""
        if self.most > 1:
            busy = self._others()
            self.use(max(1, round(self.most - busy)), f"other programs use {busy:.1f} of {self.most} cores")

    def use(self, count: int, reason: str = "") -> None:
        """At most one for each core. `reason`: logged, if this changes something."""
        count = min(count, self.most)
        if count != self.count:
            self._set(count)
            self.count = count
            if reason:
                _log.info("matrix products use %d of %d threads: %s", count, self.most, reason)
