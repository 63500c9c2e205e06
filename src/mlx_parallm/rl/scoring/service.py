"""ScoringService: rewards from the scoring process, whatever scorers do there.

A group that cannot be scored costs itself only. What waits is a queue; the group at its head is the one that the child
works on, so it is the one to blame when the child fails. The others are sent again, to a new child.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.core import Collection, Trajectory
from mlx_parallm.rl.parts import ScoringError
from mlx_parallm.rl.scoring.batching import BatchSize
from mlx_parallm.rl.scoring.catalogue import Catalogue
from mlx_parallm.rl.scoring.process import Worker, WorkerFault, WorkerHung
from mlx_parallm.rl.scoring.sample import Sample

_log = logging.getLogger(__name__)

_MOST_TRIES = 2
"""A child that dies may have been killed by another's hand: its group is tried once more."""

_CLOSED = "the scoring service is closed"


class _Job:
    """A group that waits for its rewards."""

    def __init__(self, number: int, scorer: str, samples: Sequence[Sample]) -> None:
        """Raises ScoringError: the samples' metadata is not JSON."""
        self.number, self.scorer, self.size = number, scorer, len(samples)
        self.tries = 0
        self.rewards: asyncio.Future[tuple[float, ...]] = asyncio.get_running_loop().create_future()
        message = {"id": number, "scorer": scorer, "samples": [sample.to_json() for sample in samples]}
        try:
            self.line = json.dumps(message).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ScoringError(f"{scorer}: metadata is not JSON: {error}") from error

    def settle(self, answer: Mapping[str, Any]) -> None:
        """Raises WorkerFault: this is no answer to the group."""
        if "error" in answer:
            return self.fail(str(answer["error"]))
        rewards = answer.get("rewards")
        if not isinstance(rewards, list) or len(rewards) != self.size or not all(map(_finite, rewards)):
            raise WorkerFault("the scoring process said what is no answer")
        if not self.rewards.done():
            self.rewards.set_result(tuple(map(float, rewards)))
        return None

    def fail(self, why: str) -> None:
        if not self.rewards.done():
            self.rewards.set_exception(ScoringError(f"{self.scorer}: {why}"))


class ScoringService:
    """Implements `rl.parts.Scorers`. `check` may be called on any thread, the rest on one event loop.

    Args:
        batch_size: trajectories sent to the child at a time, at most; a larger group is sent alone, whole.
        timeout_s: how long the child may work on one group, not counting the import of its scorer.
    """

    def __init__(self, batch_size: int, timeout_s: float) -> None:
        self._batch_size, self._timeout_s = BatchSize(batch_size), timeout_s
        self._catalogue = Catalogue()
        self._numbers = itertools.count(1)
        self._waiting: deque[_Job] = deque()
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def check(self, collection: Collection) -> None:
        """Waits for a child process, for seconds, the first time that a scorer is named which is not built in.

        Raises:
            InvalidRequestError: unknown or unusable scorer, or `metadata` lacks what it reads.
        """
        self._catalogue.check(collection)

    async def score(self, group: Sequence[Trajectory]) -> tuple[float, ...]:
        """Rewards of trajectories that have one scorer, in order. Raises ScoringError."""
        if not group:
            return ()
        scorer = group[0].collection.scorer
        if scorer is None or self._closed:
            raise ScoringError(_CLOSED if self._closed else "the group names no scorer")
        job = _Job(next(self._numbers), scorer, [Sample.of(trajectory) for trajectory in group])
        self._waiting.append(job)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="scoring")
        return await job.rewards

    async def close(self) -> None:
        """Ends the child; groups that wait fail."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(_CLOSED)
        await self._end_worker()

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._score_batch()
        finally:
            self._fail_all(_CLOSED if self._closed else "scoring stopped; the server's log says why")

    async def _score_batch(self) -> None:
        """Groups leave the queue when they are answered. The one at the head is to blame for a fault."""
        try:
            batch = self._batch()
            worker = await self._started()
            sent = time.monotonic()
            for job in batch:
                worker.send(job.line)
            for job in batch:
                job.settle(await worker.answer(job.number))
                self._waiting.popleft()
            self._batch_size.took(sum(job.size for job in batch), time.monotonic() - sent)
        except WorkerFault as fault:
            await self._end_worker()
            self._blame(self._waiting[0], fault)

    def _batch(self) -> list[_Job]:
        """From the head of the queue, one at least."""
        sizes = itertools.accumulate(job.size for job in self._waiting)
        fits = sum(1 for _ in itertools.takewhile(lambda size: size <= self._batch_size.now, sizes))
        return list(itertools.islice(self._waiting, max(fits, 1)))

    def _blame(self, job: _Job, fault: WorkerFault) -> None:
        job.tries += 1
        _log.warning("scoring with %s: %s", job.scorer, fault)
        if isinstance(fault, WorkerHung) or job.tries >= _MOST_TRIES:
            job.fail(str(fault))
            self._waiting.popleft()

    def _fail_all(self, why: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(why)

    async def _started(self) -> Worker:
        if self._worker is not None and not self._worker.alive:
            await self._end_worker()
        if self._worker is None:
            self._worker = await Worker.start(self._timeout_s)
        return self._worker

    async def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()


def _finite(reward: object) -> bool:
    return isinstance(reward, float | int) and math.isfinite(reward)
