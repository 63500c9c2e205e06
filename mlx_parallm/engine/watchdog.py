"""DeviceWatchdog notices that the device thread hangs in one piece of work."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_TICK_S = 1.0
_GRACE_S = 10.0
"""Seconds from the end of the limit to the end of the process, if it has not ended by itself."""
LOADING_S = 3600.0
"""Loading a base model may take so long, in seconds, whatever the limit is: its files may be on a slow disk."""
EXIT_HUNG = 1

_Work = tuple[str, float]
"""A piece of work of the device thread: its stage, and the seconds that it may take in any case."""


class DeviceWatchdog:
    """Counts how long the device thread has been at one piece of work, and ends the process when that is too long.

        device thread      begin(stage) for each piece of work, rest() before it waits for some
        watchdog's thread  once a second: the same object as a second ago? then it took one second more

    The seconds are counted here, not read off a clock, so they stand still while the machine sleeps or the process is
    stopped.

    Args:
        limit_s: seconds that one piece of work may take. None: nothing is watched.
        on_hang: called once on the watchdog's thread when that is over, with what hangs and where. Some seconds later
            the process ends with status 1, because a thread that hangs in MLX cannot be ended.
        leave: ends the process.
    """

    def __init__(
        self,
        limit_s: float | None,
        on_hang: Callable[[str, TracebackType | None], None],
        leave: Callable[[], None] = lambda: os._exit(EXIT_HUNG),
    ) -> None:
        self._limit_s = math.inf if limit_s is None else limit_s
        self._tick_s = min(_TICK_S, self._limit_s / 4)
        self._on_hang = on_hang
        self.leave = leave
        self._now: _Work | None = None
        self._seen: _Work | None = None  # at the last tick; it is held, so no other work is the same object
        self._ticks = 0  # since it was first seen
        self._stopped = threading.Event()
        self.notice = ""
        """What may hang: work that has taken half of its time already. Empty if there is none."""

    # -- the device thread -----------------------------------------------------------------------

    def begin(self, stage: str, least_limit_s: float = 0.0) -> None:
        """The device thread begins another piece of work, which may take the limit, or this if it is longer."""
        self._now = (stage, least_limit_s)

    def rest(self) -> None:
        """The device thread has nothing to do."""
        self._now = None

    # -- other threads ---------------------------------------------------------------------------

    def watch(self, thread: threading.Thread) -> None:
        """Watches a thread until `stop`, or until it ends."""
        if math.isfinite(self._limit_s):
            threading.Thread(target=self._run, args=(thread,), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self, thread: threading.Thread) -> None:
        while not self._stopped.wait(self._tick_s) and thread.is_alive():
            if self.tick():
                self._on_hang(self.notice, _traceback(thread))
                if not self._stopped.wait(_GRACE_S):
                    self.leave()
                return

    def tick(self) -> bool:
        """Notes that some time has passed. Returns whether the thread hangs."""
        now = self._now
        if now is None or now is not self._seen:
            self._seen, self._ticks, self.notice = now, 0, ""
            return False
        self._ticks += 1
        (stage, least_limit_s), seconds = now, self._ticks * self._tick_s
        limit_s = max(self._limit_s, least_limit_s)
        if seconds >= limit_s / 2:
            self.notice = f"The device thread seems to hang: {stage} has taken {seconds:.0f} s."
        return seconds >= limit_s


def _traceback(thread: threading.Thread) -> TracebackType | None:
    """Where a thread is now, as the traceback of an error there."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    traceback = None
    while frame is not None:
        traceback = TracebackType(traceback, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return traceback
