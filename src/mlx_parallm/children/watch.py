"""A child ends with its parent, however the parent ended."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def end_with_parent() -> None:
    """Forks a process that kills this process's group, itself included, once stdin's other end is closed.

    The parent holds that end and closes it by ending, kill -9 included. A thread could not do it: a scorer may hold the
    interpreter's lock without end. Call it before `private_pipes` and before any thread is started, in a process that
    leads a group of its own.
    """
    if os.fork():
        return
    os.close(1)  # the parent reads the end of our output when the process itself has ended
    watch = select.poll()
    watch.register(0, 0)  # poll always reports a hangup
    watch.poll()
    os.killpg(0, signal.SIGKILL)


@contextmanager
def life_line() -> Iterator[int]:
    """A stdin for a child that reads none: its other end is closed when the block is left, or this process ends."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)
