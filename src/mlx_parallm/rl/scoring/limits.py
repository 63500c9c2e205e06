"""A limit on the processor time of a piece of work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooSlowError(BaseException):
    """No Exception, so that no library takes it for one of its own."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises TooSlowError in the block once it has used so much processor time. Main thread only.

    Processor time, so that a busy machine costs nobody a reward. It stops Python code, and `re`, which looks for
    signals while it matches. SIGALRM is left to math-verify.
    """

    def expired(signal_number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, expired)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
