"""ScoringPool: jobs for scoring processes, which may hang, die or answer nonsense.

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
from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.processes import command, environment
from mlx_parallm.rl.scoring.queue import FairQueue, JobBatch

_log = logging.getLogger(__name__)

_MAX_TRIES = 2
"""A process may have been killed from outside, so the job of a process that died is tried once more."""

_LOAD_S = 120.0
"""Time for a process to start and to import a scorer. It is not counted as scoring time."""

_MAX_REPLY = 1 << 20
_GRACE_S = 0.1

_BATCH_S = 0.25
"""Time that scoring one batch should take. Rewards come back by batches, and the next one gathers meanwhile."""

_NEWEST = 0.3
"""Weight of the newest batch in the running time per completion."""

CLOSED = "the scoring service is closed"


class ScoringError(Exception):
    """A scorer raised, hung, or returned something that is not a finite number. Only its group is affected."""


class WorkerFault(Exception):  # noqa: N818 - the fault is the process's
    """The process must be killed: it died, or its reply is not an answer."""


class WorkerHung(WorkerFault):
    """A job took longer than its time limit."""


class ScoringJob:
    """One message to a scoring process, and its reply.

    Args:
        client, rule, size: see `QueuedJob`.
        message: JSON; an `id` is added.
        valid: whether a reply answers the message.

    Raises:
        ScoringError: the message is not JSON.
    """

    def __init__(
        self, client: str, rule: str, size: int, message: Mapping[str, Any], valid: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        self.client, self.rule, self.size = client, rule, size
        self.number = next(_numbers)
        self.tries = 0
        self.reply: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._valid = valid
        try:
            self.line = json.dumps({"id": self.number, **message}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ScoringError(f"metadata is not JSON: {error}") from error

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Raises WorkerFault: the reply does not answer the message."""
        if "error" in reply:
            return self.fail(str(reply["error"]))
        if not self._valid(reply):
            raise WorkerFault("the reply of the scoring process is not an answer")
        if not self.reply.done():
            self.reply.set_result(reply)
        return None

    def fail(self, why: str) -> None:
        if not self.reply.done():
            self.reply.set_exception(ScoringError(why))


_numbers = itertools.count(1)


class BatchSize:
    """Completions per batch: as many as take about a quarter of a second, by the last batches; at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds_each: float | None = None

    @property
    def now(self) -> int:
        if not self._seconds_each:
            return self._most
        return min(max(int(_BATCH_S / self._seconds_each), 1), self._most)

    def observe(self, completions: int, seconds: float) -> None:
        """Call this with each batch that was answered."""
        each, known = seconds / completions, self._seconds_each
        self._seconds_each = each if known is None else known + _NEWEST * (each - known)


class ScoringPool:
    """Starts processes when there are jobs for them, and keeps them. On one event loop.

    Args:
        size: number of processes at most.
        batch_size: completions sent to a process at a time, at most; a larger job is sent alone and whole.
        timeout_s: how long a process may work on one job, not counting the import of its scorer.
    """

    def __init__(self, size: int, batch_size: int, timeout_s: float) -> None:
        self._queue: FairQueue[ScoringJob] = FairQueue(size)
        self._batch_size, self._timeout_s = BatchSize(batch_size), timeout_s
        self._idle: list[ScoringProcess | None] = [None] * size  # the last one is used first; None: not started
        self._busy: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(self, job: ScoringJob) -> Mapping[str, Any]:
        """The reply to a job. Raises ScoringError: the job failed, or its process did."""
        if self._closed:
            raise ScoringError(CLOSED)
        self._queue.put(job)
        self._start_next()
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
        while (batch := self._queue.take(1)) is not None:
            self._fail(batch.jobs)
            self._queue.end(batch, 0.0)
        await asyncio.gather(*(process.kill() for process in self._idle if process is not None))
        self._idle.clear()

    def _start_next(self) -> None:
        """Gives the next batch to an idle process, if there are both."""
        if self._idle and not self._closed and (batch := self._queue.take(self._batch_size.now)) is not None:
            task = asyncio.create_task(self._work(self._idle.pop(), batch), name="scoring")
            self._busy.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        self._start_next()

    async def _work(self, process: ScoringProcess | None, batch: JobBatch[ScoringJob] | None) -> None:
        """Runs batches on one process until no waiting job may start."""
        try:
            while batch is not None:
                process = await self._run_batch(process, batch)
                batch = self._queue.take(self._batch_size.now)
        finally:
            self._idle.append(process)

    async def _run_batch(self, process: ScoringProcess | None, batch: JobBatch[ScoringJob]) -> ScoringProcess | None:
        """Returns the process that ran the batch; None if it was killed."""
        jobs, began = list(batch.jobs), time.monotonic()
        try:
            process = await self._started(process)
            await self._send(process, jobs)
            self._batch_size.observe(sum(job.size for job in batch.jobs), time.monotonic() - began)
        except WorkerFault as fault:
            if process is not None:
                await process.kill()
            process = None
            self._blame(jobs, fault)
            self._queue.put_back(tuple(jobs))
            jobs.clear()
        except asyncio.CancelledError:
            if process is not None:
                await process.kill()
            raise
        finally:
            self._fail(jobs)
            self._queue.end(batch, time.monotonic() - began)
        return process

    async def _started(self, process: ScoringProcess | None) -> ScoringProcess:
        if process is not None and not process.alive:
            await process.kill()
            process = None
        return process or await ScoringProcess.start(self._timeout_s)

    async def _send(self, process: ScoringProcess, jobs: list[ScoringJob]) -> None:
        """Jobs leave the list when they are answered, so its first job is the one that the process is working on."""
        for job in jobs:
            process.send(job.line)
        while jobs:
            jobs[0].answer(await process.answer(jobs[0].number))
            del jobs[0]

    def _blame(self, jobs: list[ScoringJob], fault: WorkerFault) -> None:
        jobs[0].tries += 1
        _log.warning("scoring with %s: %s", jobs[0].rule, fault)
        if isinstance(fault, WorkerHung) or jobs[0].tries >= _MAX_TRIES:
            jobs.pop(0).fail(str(fault))

    def _fail(self, jobs: list[ScoringJob] | tuple[ScoringJob, ...]) -> None:
        for job in jobs:
            job.fail(CLOSED if self._closed else "scoring stopped; the server's log says why")


class ScoringProcess:
    """One child process, `worker`. It answers jobs in the order in which they were sent."""

    def __init__(self, process: Process, limit_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._requests, self._replies = process, process.stdin, process.stdout
        self._limit_s = limit_s

    @classmethod
    async def start(cls, limit_s: float) -> ScoringProcess:
        """Raises WorkerFault: the operating system refused. The process is in a session of its own, so that Ctrl-C
        does not reach it."""
        module = "mlx_parallm.rl.scoring.worker"
        try:
            process = await asyncio.create_subprocess_exec(
                *command(module),
                env=environment(),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                limit=_MAX_REPLY,
            )
        except OSError as error:
            raise WorkerFault(f"the scoring process could not be started: {error}") from error
        return cls(process, limit_s)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, line: bytes) -> None:
        """Never waits: what a busy process has not read yet is buffered here."""
        self._requests.write(line)

    async def answer(self, number: int) -> Mapping[str, Any]:
        """The reply to the job of this number.

        Raises:
            WorkerHung: it took too long after its scorer was loaded.
            WorkerFault: the process died, or its reply is not an answer.
        """
        reply = await self._read(number, _LOAD_S)
        return await self._read(number, self._limit_s) if "begun" in reply else reply

    async def kill(self) -> None:
        """Kills the process, and the processes that its scorers started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS refuses for a zombie
            os.killpg(self._process.pid, signal.SIGKILL)
        self._requests.close()
        await self._process.wait()

    async def _read(self, number: int, within_s: float) -> Mapping[str, Any]:
        line = await self._line(within_s)
        if not line:
            raise WorkerFault("the scoring process died")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("id") != number:
            raise WorkerFault("the reply of the scoring process is not an answer")
        return reply

    async def _line(self, within_s: float) -> bytes:
        """The next line of replies; empty if the process has ended."""
        reading = asyncio.ensure_future(self._replies.readline())
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
