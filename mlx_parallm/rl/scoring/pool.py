"""ScoringPool runs scoring jobs in child processes, which may hang, die or send invalid replies. FairQueue chooses the
job that a free process gets.

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
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlx_parallm.processes import command, environment

_log = logging.getLogger(__name__)

_MAX_TRIES = 2
"""A process may have been killed from outside, so the job of a process that died is tried once more."""

_LOAD_S = 120.0
"""Time for a process to start and to import a scorer. It is not counted as scoring time."""

_LONGEST_BATCH_S = 0.25
"""Time after which a batch gets no more jobs, even if it has room for them."""

_MAX_REPLY = 1 << 20
_GRACE_S = 0.1

CLOSED = "the scoring service is closed"


class ScoringError(Exception):
    """A scorer raised, hung, or returned something that is not a finite number. Only its group is affected."""


class WorkerFault(Exception):  # noqa: N818 - the fault is the process's
    """The process was killed: it died, or its reply is not an answer."""


class WorkerHung(WorkerFault):
    """A job, or loading its scorer, took longer than its time limit."""


# ---- who is next ---------------------------------------------------------------------------------


class Rule(NamedTuple):
    """What the jobs of a batch have in common: the client, and the scorer with a digest of its metadata."""

    client: str
    scorer: str
    digest: str


@dataclass(eq=False, slots=True)
class ScoringJob:
    """A job that waits for a process, or has one.

    Attributes:
        size: completions in it.
        process: None while it waits.
        ready: set when it has a process, or when there is none for it any more.
        batch_size, batch_s: completions and seconds of its batch so far, with those of the jobs before this one.
    """

    rule: Rule
    size: int
    process: ScoringProcess | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    batch_size: int = 0
    batch_s: float = 0.0


class FairQueue:
    """The waiting jobs, and the choice of the next one, so that no client holds up the others. Pure decisions.

    The client with the fewest jobs in progress is next. Of several such clients, the one that has used the least time
    is next: this is least attained service, known from operating systems. The same policy chooses among one client's
    scorers. A newcomer starts with the least time that anybody present has used, so it cannot hold up the others
    either. Clients and rules without jobs are forgotten.

    Jobs of one rule that a process gets in a row are a batch. If there are several processes, jobs with one rule never
    use all of them, so a slow rule leaves one free.

    Args:
        processes: jobs that may be in progress together.
        most: completions of a batch at most; a larger job is a batch by itself.
    """

    def __init__(self, processes: int, most: int) -> None:
        self.waiting: list[ScoringJob] = []
        self._most = most
        self._max_of_a_rule = max(processes - 1, 1)
        self._running: Counter[Rule] = Counter()
        self._client_seconds: dict[str, float] = {}
        self._rule_seconds: dict[Rule, float] = {}

    def put(self, job: ScoringJob) -> None:
        self.waiting.append(job)
        self._client_seconds.setdefault(job.rule.client, min(self._client_seconds.values(), default=0.0))
        self._rule_seconds.setdefault(job.rule, min(self._rule_seconds.values(), default=0.0))

    def take(self, ended: ScoringJob | None = None) -> ScoringJob | None:
        """The job that may start now; None: none may.

        Args:
            ended: what the free process has just done. Its batch goes on with the next job of the same rule, as long as
                it is short.
        """
        job, before = self._same_batch(ended) if ended is not None else None, ended
        if job is None:
            job, before = self._first(), None
        if job is not None:
            self.waiting.remove(job)
            self._running[job.rule] += 1
            job.batch_size = job.size + (before.batch_size if before else 0)
            job.batch_s = before.batch_s if before else 0.0
        return job

    def end(self, job: ScoringJob, seconds: float) -> None:
        """Call this once for each job that was put. `seconds`: the time that it had a process."""
        if job in self.waiting:  # nobody waits for it any more
            self.waiting.remove(job)
        else:
            self._running[job.rule] -= 1
            self._client_seconds[job.rule.client] += seconds
            self._rule_seconds[job.rule] += seconds
            job.batch_s += seconds
        self._running = +self._running
        rules = {*self._running, *(job.rule for job in self.waiting)}
        clients = {rule.client for rule in rules}
        self._rule_seconds = {rule: used for rule, used in self._rule_seconds.items() if rule in rules}
        self._client_seconds = {client: used for client, used in self._client_seconds.items() if client in clients}

    def _same_batch(self, ended: ScoringJob) -> ScoringJob | None:
        """The next job of the same rule, if there is one and the batch has room for it."""
        following = next((job for job in self.waiting if job.rule == ended.rule), None)
        if following is None or ended.batch_s >= _LONGEST_BATCH_S or ended.batch_size + following.size > self._most:
            return None
        return following

    def _first(self) -> ScoringJob | None:
        running = Counter(rule.client for rule in self._running.elements())
        return min(
            (job for job in self.waiting if self._running[job.rule] < self._max_of_a_rule),
            key=lambda job: (  # of equal ones the first that arrived
                running[job.rule.client],
                self._client_seconds[job.rule.client],
                self._running[job.rule],
                self._rule_seconds[job.rule],
            ),
            default=None,
        )


# ---- the pool ------------------------------------------------------------------------------------


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


# ---- one process ---------------------------------------------------------------------------------


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
