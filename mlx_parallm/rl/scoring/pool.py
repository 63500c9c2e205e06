"""ScoringPool runs scoring jobs in child processes, which may hang, die or send invalid replies.

A fault costs only the job that caused it. The jobs of a batch are sent together; if the process fails, the job that it
was working on is to blame, and the others go back to the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping
from typing import Any

from mlx_parallm.processes import command, environment
from mlx_parallm.rl.scoring.queue import FairQueue, Rule
from mlx_parallm.tasks import spawn

_log = logging.getLogger(__name__)

_MAX_TRIES = 2
"""A process may have been killed from outside, so the job of a process that died is tried once more."""

_LOAD_S = 120.0
"""Time for a process to start and to import a scorer. It is not counted as scoring time."""

_MAX_REPLY = 1 << 20
_GRACE_S = 0.1

_BATCH_S = 0.25
"""Time that scoring one batch should take. Jobs that arrive meanwhile wait for a later batch."""

_NEWEST = 0.3
"""Weight of the newest batch in the running time per completion."""

CLOSED = "the scoring service is closed"


class ScoringError(Exception):
    """A scorer raised, hung, or returned something that is not a finite number. Only its group is affected."""


class WorkerFault(Exception):  # noqa: N818 - the fault is the process's
    """The process must be killed: it died, or its reply is not an answer."""


class WorkerHung(WorkerFault):
    """A job, or loading its scorer, took longer than its time limit."""


class ScoringJob:
    """One message to a scoring process, and its reply.

    Args:
        size: completions in it.
        message: JSON; an `id` is added.

    Raises:
        ScoringError: the message is not JSON.
    """

    _numbers = itertools.count(1)

    def __init__(self, rule: Rule, size: int, message: Mapping[str, Any]) -> None:
        self.rule, self.size, self.tries = rule, size, 0
        self.number = next(self._numbers)
        self.reply: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        try:
            self.line = json.dumps({"id": self.number, **message}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ScoringError(f"metadata is not JSON: {error}") from error

    def answer(self, reply: Mapping[str, Any]) -> None:
        if "error" in reply:
            self.fail(str(reply["error"]))
        elif not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, why: str) -> None:
        if not self.reply.done():
            self.reply.set_exception(ScoringError(why))


class BatchSize:
    """How many completions a batch has: as many as recent batches score in a quarter of a second, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds_each: float | None = None

    @property
    def now(self) -> int:
        if not self._seconds_each:
            return self._most
        return min(max(int(_BATCH_S / self._seconds_each), 1), self._most)

    def observe(self, completions: int, seconds: float) -> None:
        """Adds a batch that was answered to the measurement."""
        each, known = seconds / completions, self._seconds_each
        self._seconds_each = each if known is None else known + _NEWEST * (each - known)


class ScoringPool:
    """Runs scoring jobs in processes, which start when there are jobs and then stay. Event loop's thread only.

    Args:
        size: number of processes at most.
        batch_size: completions sent to a process at a time, at most; a larger job is sent alone and whole.
        timeout_s: how long a process may work on one job, not counting the import of its scorer.
    """

    def __init__(self, size: int, batch_size: int, timeout_s: float) -> None:
        self._queue: FairQueue[ScoringJob] = FairQueue(size)
        self._batch_size = BatchSize(batch_size)
        self._idle = [ScoringProcess(timeout_s) for _ in range(size)]  # the last one is used first
        self._busy: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(self, job: ScoringJob) -> Mapping[str, Any]:
        """The reply to a job. Raises ScoringError: the job failed, or its process did."""
        if self._closed:
            raise ScoringError(CLOSED)
        self._queue.put(job)
        if self._idle and (batch := self._queue.take(self._batch_size.now)) is not None:
            task = spawn(self._work(self._idle.pop(), batch), _log, "scoring")
            self._busy.add(task)
            task.add_done_callback(self._busy.discard)
        try:
            return await job.reply
        except asyncio.CancelledError:
            self._queue.withdraw(job)
            raise

    async def close(self) -> None:
        """Ends the processes; waiting jobs fail."""
        self._closed = True
        for task in self._busy:
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)
        for job in self._queue.waiting:
            job.fail(CLOSED)
        await asyncio.gather(*(process.kill() for process in self._idle))
        self._idle.clear()

    async def _work(self, process: ScoringProcess, batch: list[ScoringJob] | None) -> None:
        """Runs batches on one process until no waiting job may start."""
        try:
            while batch is not None:
                began = time.monotonic()
                try:
                    await self._run_batch(process, batch)
                finally:
                    self._queue.end(batch, time.monotonic() - began)
                batch = self._queue.take(self._batch_size.now)
        finally:
            self._idle.append(process)

    async def _run_batch(self, process: ScoringProcess, batch: list[ScoringJob]) -> None:
        """Every job of the batch is answered, failed, or back in the queue when this returns."""
        jobs, began = deque(batch), time.monotonic()  # without an answer yet: the process is working on the first
        try:
            await process.start()
            for job in batch:
                process.send(job.line)
            while jobs:
                jobs[0].answer(await process.answer(jobs[0].number))
                jobs.popleft()
            self._batch_size.observe(sum(job.size for job in batch), time.monotonic() - began)
        except WorkerFault as fault:
            await process.kill()
            _log.warning("scoring with %s: %s", jobs[0].rule.scorer, fault)
            jobs[0].tries += 1
            if isinstance(fault, WorkerHung) or jobs[0].tries >= _MAX_TRIES:
                jobs.popleft().fail(str(fault))
            self._queue.put_back(jobs)
        except BaseException:
            await process.kill()
            for job in jobs:
                job.fail(CLOSED if self._closed else "scoring stopped; the server's log says why")
            raise


class ScoringProcess:
    """One child process, which runs `worker`. It answers jobs in the order in which they were sent.

    Args:
        limit_s: how long it may work on one job, not counting the import of its scorer.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._child: Process | None = None

    async def start(self) -> None:
        """Starts the child process unless it runs. It has a session of its own, so that Ctrl-C does not reach it.

        Raises:
            WorkerFault: the operating system cannot start it.
        """
        if self._child is not None and self._child.returncode is None:
            return
        await self.kill()
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

    async def kill(self) -> None:
        """Kills the child process, and the processes that its scorers started."""
        if (child := self._child) is None:
            return
        self._child = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS refuses for a zombie
            os.killpg(child.pid, signal.SIGKILL)
        assert child.stdin is not None
        child.stdin.close()
        await child.wait()

    def send(self, line: bytes) -> None:
        """Sends one job. It never waits: what a busy process has not read yet is buffered here."""
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(line)

    async def answer(self, number: int) -> Mapping[str, Any]:
        """The reply to the job of this number.

        Raises:
            WorkerHung: loading its scorer took too long, or the job did after that.
            WorkerFault: the process died, or its reply is not an answer.
        """
        for within_s in (_LOAD_S, self._limit_s):
            line = await self._line(within_s)
            if not line:
                raise WorkerFault("the scoring process died")
            try:
                reply = json.loads(line)
            except (ValueError, RecursionError):
                reply = None
            if not isinstance(reply, dict) or reply.get("id") != number:
                raise WorkerFault("the reply of the scoring process is not an answer")
            if "begun" not in reply:
                return reply
        raise WorkerFault("the reply of the scoring process is not an answer")

    async def _line(self, within_s: float) -> bytes:
        """The next line of replies; empty if the process has ended."""
        assert self._child is not None
        assert self._child.stdout is not None
        reading = asyncio.ensure_future(self._child.stdout.readline())
        try:
            for timeout_s in (within_s, _GRACE_S):  # a reply may wait unread if the event loop was held up
                await asyncio.wait({reading}, timeout=timeout_s)
            if not reading.done():
                raise WorkerHung(f"took more than {within_s:g} s")
            return reading.result()
        except ValueError as error:
            raise WorkerFault("the reply of the scoring process is too long") from error
        finally:
            reading.cancel()
