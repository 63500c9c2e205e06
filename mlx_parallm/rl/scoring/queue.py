"""FairQueue: which of the waiting scoring jobs is next, so that no client holds up the others. Pure Python.

The policy is least attained service, known from operating systems: the client that has used the least time is next. A
new client starts with the least time that any present client has used, so it cannot hold up the others either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Generic, Protocol, TypeVar


class QueuedJob(Protocol):
    """`rule`: the scorer with its metadata, so jobs with one rule can be sent together. `size`: completions."""

    @property
    def client(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def size(self) -> int: ...


J = TypeVar("J", bound=QueuedJob)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class JobBatch(Generic[J]):
    """Jobs of one client and one rule, in order of arrival."""

    client: str
    rule: str
    jobs: tuple[J, ...]


class FairQueue(Generic[J]):
    """One client's jobs with one rule use all but one of the processes at most, so a slow rule always leaves one free.

    Args:
        processes: batches that may be in progress together.
    """

    def __init__(self, processes: int) -> None:
        self._max_of_a_rule = max(processes - 1, 1)
        self._waiting: list[J] = []
        self._clients: _Usage[str] = _Usage()
        self._rules: _Usage[tuple[str, str]] = _Usage()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, job: J) -> None:
        self._waiting.append(job)
        self._clients.add_job(job.client)
        self._rules.add_job((job.client, job.rule))

    def put_back(self, jobs: tuple[J, ...]) -> None:
        """Puts jobs of a batch that were not done ahead of all others."""
        for job in jobs:
            self.put(job)
        self._waiting = [*jobs, *self._waiting[: len(self._waiting) - len(jobs)]]

    def withdraw(self, job: J) -> None:
        """Removes a job that nobody waits for any more, if it is still in the queue."""
        if job in self._waiting:
            self._remove([job])

    def take(self, most: int) -> JobBatch[J] | None:
        """The next batch, of at most `most` completions or of one job. None: no waiting job may start now."""
        allowed = [job for job in self._waiting if self._rules.running[job.client, job.rule] < self._max_of_a_rule]
        if not allowed:
            return None
        first = min(allowed, key=self._order)  # of equal ones the first that arrived
        alike = [job for job in allowed if (job.client, job.rule) == (first.client, first.rule)]
        fits = sum(1 for _ in takewhile(lambda size: size <= most, accumulate(job.size for job in alike)))
        batch = JobBatch(first.client, first.rule, tuple(alike[: max(fits, 1)]))
        self._clients.start(batch.client)
        self._rules.start((batch.client, batch.rule))
        self._remove(batch.jobs)
        return batch

    def end(self, batch: JobBatch[J], seconds: float) -> None:
        """Call this once for each batch, with the time that it took."""
        self._clients.end(batch.client, seconds)
        self._rules.end((batch.client, batch.rule), seconds)

    def _order(self, job: J) -> tuple[float, ...]:
        client, rule = job.client, (job.client, job.rule)
        clients, rules = self._clients, self._rules
        return clients.running[client], clients.seconds[client], rules.running[rule], rules.seconds[rule]

    def _remove(self, jobs: tuple[J, ...] | list[J]) -> None:
        for job in jobs:
            self._waiting.remove(job)
            self._clients.remove_job(job.client)
            self._rules.remove_job((job.client, job.rule))


class _Usage(Generic[K]):
    """The time that each key has used, and its batches in progress. A key without jobs and batches is forgotten."""

    def __init__(self) -> None:
        self.seconds: dict[K, float] = {}
        self.running: Counter[K] = Counter()
        self._jobs: Counter[K] = Counter()

    def add_job(self, key: K) -> None:
        self.seconds.setdefault(key, min(self.seconds.values(), default=0.0))
        self._jobs[key] += 1

    def remove_job(self, key: K) -> None:
        self._jobs[key] -= 1
        self._forget_if_idle(key)

    def start(self, key: K) -> None:
        self.running[key] += 1

    def end(self, key: K, seconds: float) -> None:
        self.running[key] -= 1
        self.seconds[key] += seconds
        self._forget_if_idle(key)

    def _forget_if_idle(self, key: K) -> None:
        if not self._jobs[key] and not self.running[key]:
            del self._jobs[key], self.running[key], self.seconds[key]
