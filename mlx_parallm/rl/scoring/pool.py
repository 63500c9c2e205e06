"""ScoringPool runs scoring jobs in child processes, which may hang, die or send invalid replies.

A process works on one job at a time, so a fault costs only the job that caused it. No library's pool is used: those of
pebble and loky share one pipe between their processes, so one that dies or writes into the pipe ends the others' work,
and all of them import the server's main module and leave children behind when the server is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from typing import Any

from mlx_parallm.processes import command, environment
from mlx_parallm.rl.scoring.queue import FairQueue, Rule, ScoringJob

_log = logging.getLogger(__name__)

_MAX_TRIES = 2
"""A process may have been killed from outside, so the job of a process that died is tried once more."""

_LOAD_S = 120.0
"""Time for a process to start and to import a scorer. It is not counted as scoring time."""

_MAX_REPLY = 1 << 20
_GRACE_S = 0.1

CLOSED = "the scoring service is closed"


class ScoringError(Exception):
    """A scorer raised, hung, or returned something that is not a finite number. Only its group is affected."""


class WorkerFault(Exception):  # noqa: N818 - the fault is the process's
    """The process was killed: it died, or its reply is not an answer."""


class WorkerHung(WorkerFault):
    """A job, or loading its scorer, took longer than its time limit."""


class ScoringPool:
    """Runs scoring jobs in processes, which start when there are jobs and then stay. Event loop's thread only.

    Args:
        size: number of processes at most.
        batch_size: completions of one batch at most; see `FairQueue`.
        timeout_s: how long a process may work on one job, not counting the import of its scorer.
    """

    def __init__(self, size: int, batch_size: int, timeout_s: float) -> None:
        self._queue = FairQueue(size, batch_size)
        self._processes = tuple(ScoringProcess(timeout_s) for _ in range(size))
        self._idle = list(self._processes)  # the last one is used first
        self._closed = False

    async def run(self, rule: Rule, size: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The reply to a message with `size` completions. If the caller is cancelled, the process is killed.

        Raises:
            ScoringError: the job failed, or its process did.
        """
        for tries in range(1, _MAX_TRIES + 1):
            async with self._process(ScoringJob(rule, size)) as process:
                try:
                    return await process.ask(message)
                except WorkerFault as fault:
                    if self._closed:
                        break
                    _log.warning("scoring with %s: %s", rule.scorer, fault)
                    if isinstance(fault, WorkerHung) or tries == _MAX_TRIES:
                        raise ScoringError(str(fault)) from fault
        raise ScoringError(CLOSED)

    async def close(self) -> None:
        """Ends the processes; jobs in progress and waiting ones fail."""
        self._closed = True
        for job in self._queue.waiting:
            job.ready.set()
        await asyncio.gather(*(process.close() for process in self._processes))

    @contextlib.asynccontextmanager
    async def _process(self, job: ScoringJob) -> AsyncIterator[ScoringProcess]:
        """A process for this job alone, when it is the next."""
        self._queue.put(job)
        began = time.monotonic()
        try:
            self._hand_out()
            if not self._closed:
                await job.ready.wait()
            if job.process is None:
                raise ScoringError(CLOSED)
            began = time.monotonic()
            yield job.process
        finally:
            self._queue.end(job, time.monotonic() - began)
            if job.process is not None:
                self._idle.append(job.process)
                self._hand_out(job)

    def _hand_out(self, ended: ScoringJob | None = None) -> None:
        """Gives idle processes to waiting jobs."""
        while self._idle and not self._closed and (job := self._queue.take(ended)) is not None:
            job.process, ended = self._idle.pop(), None
            job.ready.set()


class ScoringProcess:
    """One child process, which runs `worker`. It starts with its first job, and again after a fault.

    Args:
        limit_s: how long it may work on one job, not counting the import of its scorer.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._child: Process | None = None
        self._asked = 0
        self._closed = False

    async def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The reply to one message. If there is none, for any reason, the child process is killed.

        Raises:
            ScoringError: the scorer failed, or the message is not JSON.
            WorkerHung: loading the scorer took too long, or the job did after that.
            WorkerFault: the process could not be started, it died, or its reply is not an answer.
        """
        self._asked += 1
        try:
            line = json.dumps({"id": self._asked, **message}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ScoringError(f"metadata is not JSON: {error}") from error
        try:
            child = await self._running()
            assert child.stdin is not None
            child.stdin.write(line)  # it never waits: what the child has not read yet is buffered here
            reply = await self._reply(child, _LOAD_S)
            if "begun" in reply:
                reply = await self._reply(child, self._limit_s)
        except BaseException:
            await self._kill()
            raise
        if "error" in reply:
            raise ScoringError(str(reply["error"]))
        return reply

    async def close(self) -> None:
        """Kills the child process. A job in progress fails, and none is taken any more."""
        self._closed = True
        await self._kill()

    async def _running(self) -> Process:
        """The child process, which is started unless it runs. It has a session of its own, so that Ctrl-C does not
        reach it."""
        if self._child is not None and self._child.returncode is None:
            return self._child
        await self._kill()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *command("mlx_parallm.rl.scoring.worker"),
                env=environment(),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                limit=_MAX_REPLY,
            )
        except OSError as error:
            raise WorkerFault(f"the scoring process could not be started: {error}") from error
        if self._closed:  # meanwhile
            raise WorkerFault(CLOSED)
        return self._child

    async def _kill(self) -> None:
        """Kills the child process, and the processes that its scorers started."""
        if (child := self._child) is None:
            return
        self._child = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS refuses for a zombie
            os.killpg(child.pid, signal.SIGKILL)
        assert child.stdin is not None
        child.stdin.close()
        await child.wait()

    async def _reply(self, child: Process, within_s: float) -> Mapping[str, Any]:
        """The next reply to the last message. Raises WorkerFault: there is none, or it is not an answer."""
        assert child.stdout is not None
        reading = asyncio.ensure_future(child.stdout.readline())
        try:
            for timeout_s in (within_s, _GRACE_S):  # a reply may wait unread if the event loop was held up
                await asyncio.wait({reading}, timeout=timeout_s)
            if not reading.done():
                raise WorkerHung(f"took more than {within_s:g} s")
            line = reading.result()
            reply = json.loads(line) if line else None
        except (ValueError, RecursionError) as error:  # it is too long, or no JSON
            raise WorkerFault("the reply of the scoring process is not an answer") from error
        finally:
            reading.cancel()
        if not line:
            raise WorkerFault("the scoring process died")
        if not isinstance(reply, dict) or reply.get("id") != self._asked:
            raise WorkerFault("the reply of the scoring process is not an answer")
        return reply
