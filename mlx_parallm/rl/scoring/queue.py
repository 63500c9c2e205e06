"""FairQueue chooses which job a free scoring process gets, so that no client holds up the others. Pure decisions.

The client with the fewest jobs in progress is next. Of several such clients, the one that has used the least time is
next: this is least attained service, known from operating systems. The same policy chooses among one client's scorers.
A newcomer starts with the least time that anybody present has used, so it cannot hold up the others either.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlx_parallm.rl.scoring.pool import ScoringProcess

_LONGEST_S = 0.25
"""Time after which a batch gets no more jobs, even if it has room for them."""


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
    """The waiting jobs, and the choice of the next one. Clients and rules without jobs are forgotten.

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
        if following is None or ended.batch_s >= _LONGEST_S or ended.batch_size + following.size > self._most:
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
