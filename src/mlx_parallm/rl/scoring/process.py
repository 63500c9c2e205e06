"""The scoring process, seen from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from typing import Any

from mlx_parallm.children.start import command, environment

LOAD_S = 120.0
"""For a child to start and import a scorer; not counted as the group's time."""

_LONGEST_REPLY = 1 << 20
_GRACE_S = 0.1


class WorkerFault(Exception):  # noqa: N818 - the fault is the process's
    """The process cannot be trusted any more: kill it. It died, or said what is no answer."""


class WorkerHung(WorkerFault):
    """A group took longer than its time."""


class Worker:
    """One child process. Groups are answered in the order in which they were sent."""

    def __init__(self, process: Process, limit_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._requests, self._replies = process, process.stdin, process.stdout
        self._limit_s = limit_s

    @classmethod
    async def start(cls, limit_s: float) -> Worker:
        """Raises WorkerFault: the operating system refused. In a session of its own: Ctrl-C is not for it."""
        module = "mlx_parallm.rl.scoring.worker"
        try:
            process = await asyncio.create_subprocess_exec(
                *command(module),
                env=environment(),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                limit=_LONGEST_REPLY,
            )
        except OSError as error:
            raise WorkerFault(f"the scoring process could not be started: {error}") from error
        return cls(process, limit_s)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, line: bytes) -> None:
        """Never waits: what a busy child has not read yet is held here."""
        self._requests.write(line)

    async def answer(self, number: int) -> Mapping[str, Any]:
        """`rewards` or `error` of the group of this number.

        Raises:
            WorkerHung, WorkerFault: it took too long since its scorer was loaded; the process is no good.
        """
        said = await self._read(number, LOAD_S)
        return await self._read(number, self._limit_s) if "begun" in said else said

    async def kill(self) -> None:
        """With whatever its scorers started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; on macOS a zombie refuses
            os.killpg(self._process.pid, signal.SIGKILL)
        self._requests.close()
        await self._process.wait()

    async def _read(self, number: int, within_s: float) -> Mapping[str, Any]:
        line = await self._line(within_s)
        if not line:
            raise WorkerFault("the scoring process died")
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict) or said.get("id") != number:
            raise WorkerFault("the scoring process said what is no answer")
        return said

    async def _line(self, within_s: float) -> bytes:
        """Empty where the process has ended."""
        reading = asyncio.ensure_future(self._replies.readline())
        try:
            for patience_s in (within_s, _GRACE_S):  # where the event loop was held up, the answer waits unread
                await asyncio.wait({reading}, timeout=patience_s)
            if not reading.done():
                raise WorkerHung(f"took more than {within_s:g} s")
            return reading.result()
        except ValueError as error:
            raise WorkerFault("the scoring process said too much") from error
        finally:
            reading.cancel()
