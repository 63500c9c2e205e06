"""Pool: several scoring processes, and jobs that take turns on them.

What a job does to its process costs that job only. A turn's jobs are sent together; the one that the process works on
is to blame when the process fails. The others go back to the queue.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.rl.parts import ScoringError
from mlx_parallm.rl.scoring.batching import BatchSize
from mlx_parallm.rl.scoring.process import Worker, WorkerFault, WorkerHung
from mlx_parallm.rl.scoring.turns import Turn, Turns

_log = logging.getLogger(__name__)

_MOST_TRIES = 2
"""A process that dies may have been killed by another's hand: its job is tried once more."""

CLOSED = "the scoring service is closed"


class Job:
    """One message to a scoring process, and its reply.

    Args:
        client, rule: see `turns`.
        size: samples in it.
        message: JSON; the pool adds `id`.
        valid: whether this is a reply to it.

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

    def settle(self, reply: Mapping[str, Any]) -> None:
        """Raises WorkerFault: this is no reply to the job."""
        if "error" in reply:
            return self.fail(str(reply["error"]))
        if not self._valid(reply):
            raise WorkerFault("the scoring process said what is no answer")
        if not self.reply.done():
            self.reply.set_result(reply)
        return None

    def fail(self, why: str) -> None:
        if not self.reply.done():
            self.reply.set_exception(ScoringError(why))


_numbers = itertools.count(1)


class Pool:
    """Processes are started when there is work for them, and kept. On one event loop.

    Args:
        size: processes at most.
        batch_size: samples sent to a process at a time, at most; a larger job is sent alone, whole.
        timeout_s: how long a process may work on one job, not counting the import of its scorer.
    """

    def __init__(self, size: int, batch_size: int, timeout_s: float) -> None:
        self._turns: Turns[Job] = Turns(size)
        self._batch_size, self._timeout_s = BatchSize(batch_size), timeout_s
        self._idle: list[Worker | None] = [None] * size  # the last one is used first
        self._busy: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(self, job: Job) -> Mapping[str, Any]:
        """Raises ScoringError: it failed, or its process did."""
        if self._closed:
            raise ScoringError(CLOSED)
        self._turns.put(job)
        self._staff()
        try:
            return await job.reply
        except asyncio.CancelledError:
            self._turns.withdraw(job)
            raise

    async def close(self) -> None:
        """Ends the processes; jobs that wait fail."""
        self._closed = True
        for task in self._busy:
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)
        while (turn := self._turns.take(1)) is not None:
            self._give_up(turn.jobs)
            self._turns.end(turn, 0.0)
        await asyncio.gather(*(worker.kill() for worker in self._idle if worker is not None))
        self._idle.clear()

    def _staff(self) -> None:
        """Puts an idle process to work."""
        if self._idle and not self._closed and (turn := self._turns.take(self._batch_size.now)) is not None:
            task = asyncio.create_task(self._work(self._idle.pop(), turn), name="scoring")
            self._busy.add(task)
            task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        self._staff()

    async def _work(self, worker: Worker | None, turn: Turn[Job] | None) -> None:
        """Turn after turn on one process, until nothing waits that may have it."""
        try:
            while turn is not None:
                worker = await self._take_turn(worker, turn)
                turn = self._turns.take(self._batch_size.now)
        finally:
            self._idle.append(worker)

    async def _take_turn(self, worker: Worker | None, turn: Turn[Job]) -> Worker | None:
        """The process as it is afterwards; None: it was killed."""
        jobs, began = list(turn.jobs), time.monotonic()
        try:
            worker = await self._started(worker)
            await self._send(worker, jobs)
            self._batch_size.took(sum(job.size for job in turn.jobs), time.monotonic() - began)
        except WorkerFault as fault:
            if worker is not None:
                await worker.kill()
            worker = None
            self._blame(jobs, fault)
            self._turns.put_back(tuple(jobs))
            jobs.clear()
        except asyncio.CancelledError:
            if worker is not None:
                await worker.kill()
            raise
        finally:
            self._give_up(jobs)
            self._turns.end(turn, time.monotonic() - began)
        return worker

    async def _started(self, worker: Worker | None) -> Worker:
        if worker is not None and not worker.alive:
            await worker.kill()
            worker = None
        return worker or await Worker.start(self._timeout_s)

    async def _send(self, worker: Worker, jobs: list[Job]) -> None:
        """Jobs leave the list when they are answered: the first of it is the one that the process works on."""
        for job in jobs:
            worker.send(job.line)
        while jobs:
            jobs[0].settle(await worker.answer(jobs[0].number))
            del jobs[0]

    def _blame(self, jobs: list[Job], fault: WorkerFault) -> None:
        jobs[0].tries += 1
        _log.warning("scoring with %s: %s", jobs[0].rule, fault)
        if isinstance(fault, WorkerHung) or jobs[0].tries >= _MOST_TRIES:
            jobs.pop(0).fail(str(fault))

    def _give_up(self, jobs: list[Job] | tuple[Job, ...]) -> None:
        for job in jobs:
            job.fail(CLOSED if self._closed else "scoring stopped; the server's log says why")
