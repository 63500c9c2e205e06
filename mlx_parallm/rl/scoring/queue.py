"""FairQueue chooses which waiting scoring job is next, so that no client holds up the others. Pure Python.

The client with the fewest batches in progress is next. Of several such clients, the one that has used the least time is
next: this is least attained service, known from operating systems. The same policy chooses among one client's scorers.
A newcomer starts with the least time that anybody present has used, so it cannot hold up the others either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import Generic, NamedTuple, Protocol, TypeVar


class Rule(NamedTuple):
    """What jobs must have in common to be sent together: the client, and the scorer with a digest of its metadata."""

    client: str
    scorer: str
    digest: str


class QueuedJob(Protocol):
    """A job that can wait in the queue. `size`: the number of its completions."""

    @property
    def rule(self) -> Rule: ...
    @property
    def size(self) -> int: ...


J = TypeVar("J", bound=QueuedJob)


class FairQueue(Generic[J]):
    """Waiting jobs, and the choice of the next batch: a list of jobs with one rule, in order of arrival.

    If there are several processes, jobs with one rule never use all of them, so a slow rule leaves one free. Clients
    and rules without jobs are forgotten.

    Args:
        processes: batches that may be in progress together.
    """

    def __init__(self, processes: int) -> None:
        self.waiting: list[J] = []
        self._max_of_a_rule = max(processes - 1, 1)
        self._running: Counter[Rule] = Counter()  # batches in progress
        self._client_seconds: dict[str, float] = {}
        self._rule_seconds: dict[Rule, float] = {}

    def put(self, job: J) -> None:
        self.waiting.append(job)
        self._client_seconds.setdefault(job.rule.client, min(self._client_seconds.values(), default=0.0))
        self._rule_seconds.setdefault(job.rule, min(self._rule_seconds.values(), default=0.0))

    def put_back(self, jobs: Sequence[J]) -> None:
        """Puts jobs of a batch that were not done ahead of all others. Call this before `end`."""
        self.waiting[:0] = jobs

    def withdraw(self, job: J) -> None:
        """Removes a job that nobody waits for any more, if it is still in the queue."""
        if job in self.waiting:
            self.waiting.remove(job)

    def take(self, most: int) -> list[J] | None:
        """The next batch, of at most `most` completions or of one job. None: no waiting job may start now."""
        allowed = [job for job in self.waiting if self._running[job.rule] < self._max_of_a_rule]
        if not allowed:
            return None
        running = Counter(rule.client for rule in self._running.elements())
        first = min(
            (job.rule for job in allowed),  # of equal ones the first that arrived
            key=lambda rule: (
                running[rule.client],
                self._client_seconds[rule.client],
                self._running[rule],
                self._rule_seconds[rule],
            ),
        )
        same = [job for job in allowed if job.rule == first]
        fits = sum(1 for _ in takewhile(lambda size: size <= most, accumulate(job.size for job in same)))
        batch = same[: max(fits, 1)]
        for job in batch:
            self.waiting.remove(job)
        self._running[first] += 1
        return batch

    def end(self, batch: Sequence[J], seconds: float) -> None:
        """Call this once for each batch, with the time that it took."""
        rule = batch[0].rule
        self._running[rule] -= 1
        self._client_seconds[rule.client] += seconds
        self._rule_seconds[rule] += seconds
        rules = {*self._running.elements(), *(job.rule for job in self.waiting)}
        clients = {rule.client for rule in rules}
        self._running = +self._running
        self._rule_seconds = {rule: used for rule, used in self._rule_seconds.items() if rule in rules}
        self._client_seconds = {client: used for client, used in self._client_seconds.items() if client in clients}
