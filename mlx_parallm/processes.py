"""Child processes of the server: how they are started, their pipes, and how they end with their parent.

The parent uses `command`, `environment` and `stdin_until_exit`; the child uses `private_pipes` and `end_with_parent`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from mlx_parallm.blas import ENV_VAR, THREAD_VARIABLES


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs `module`. -P keeps the working folder out of the child's import path."""
    return (sys.executable, "-P", "-m", module, *arguments)


def environment() -> dict[str, str]:
    """This process's environment and import path, for a child that loads no BLAS and runs NumPy on one thread."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), ENV_VAR: "none", "PYTHONPATH": path}


@contextmanager
def stdin_until_exit() -> Iterator[int]:
    """A file descriptor for a child's stdin. The child reads its end when the block is left or this process dies.

    For a child that calls `end_with_parent` and reads no requests.
    """
    child_end, parent_end = os.pipe()
    try:
        yield child_end
    finally:
        os.close(child_end)
        os.close(parent_end)


def end_with_parent() -> None:
    """Forks a watcher that kills this process's whole group as soon as the parent's end of stdin is closed.

    The kernel closes that end when the parent dies, whatever killed it. A watching thread would not work: a scoring
    function may hold the interpreter lock forever. Call it before `private_pipes` and before any thread starts, in a
    process that leads its own process group.
    """
    if os.fork():
        return
    os.close(1)  # so that the parent sees the end of our output when the process itself ends
    watch = select.poll()
    watch.register(0, 0)  # poll always reports a hangup
    watch.poll()
    os.killpg(0, signal.SIGKILL)


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The original stdin and stdout, as the pipes for requests and replies.

    Afterwards stdin is empty and stdout is stderr, so that no other code in this process can read a request or print
    into a reply. Processes that the child starts do not inherit the pipes.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies
