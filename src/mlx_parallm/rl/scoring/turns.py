"""Turns: which of the jobs that wait is next, so that no client holds up the others. Pure Python.

Least attained service, as in an operating system's scheduler: whoever has used the least time goes first. Newcomers
start at the least that anyone who is there has used, so that they cannot hold up the others either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """`rule`: what its client wants done, apart from the data: a scorer with its metadata. `size`: samples."""

    @property
    def client(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def size(self) -> int: ...


J = TypeVar("J", bound=Waiting)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Turn(Generic[J]):
    """Jobs of one client and one rule, in order of arrival."""

    client: str
    rule: str
    jobs: tuple[J, ...]


class Turns(Generic[J]):
    """A client's rule holds all places but one at most, so a slow one always leaves a place to others.

    Args:
        places: turns that may be under way together.
    """

    def __init__(self, places: int) -> None:
        self._most_of_a_rule = max(places - 1, 1)
        self._waiting: list[J] = []
        self._clients: _Shares[str] = _Shares()
        self._rules: _Shares[tuple[str, str]] = _Shares()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, job: J) -> None:
        self._waiting.append(job)
        self._clients.join(job.client)
        self._rules.join((job.client, job.rule))

    def put_back(self, jobs: tuple[J, ...]) -> None:
        """Jobs of a turn that were not done, ahead of those that came later."""
        for job in jobs:
            self.put(job)
        self._waiting = [*jobs, *self._waiting[: len(self._waiting) - len(jobs)]]

    def withdraw(self, job: J) -> None:
        """Nobody waits for it any more; nothing where it has had its turn."""
        if job in self._waiting:
            self._remove([job])

    def take(self, most: int) -> Turn[J] | None:
        """The next turn, of `most` samples together or of one job; None: nothing waits that may have a place."""
        free = [job for job in self._waiting if self._rules.held[job.client, job.rule] < self._most_of_a_rule]
        if not free:
            return None
        first = min(free, key=self._order)  # the first that arrived, of equals
        alike = [job for job in free if (job.client, job.rule) == (first.client, first.rule)]
        fits = sum(1 for _ in takewhile(lambda size: size <= most, accumulate(job.size for job in alike)))
        turn = Turn(first.client, first.rule, tuple(alike[: max(fits, 1)]))
        self._clients.hold(turn.client)
        self._rules.hold((turn.client, turn.rule))
        self._remove(turn.jobs)
        return turn

    def end(self, turn: Turn[J], seconds: float) -> None:
        """The turn is over, and took so long."""
        self._clients.release(turn.client, seconds)
        self._rules.release((turn.client, turn.rule), seconds)

    def _order(self, job: J) -> tuple[float, ...]:
        client, rule = job.client, (job.client, job.rule)
        return self._clients.held[client], self._clients.used[client], self._rules.held[rule], self._rules.used[rule]

    def _remove(self, jobs: tuple[J, ...] | list[J]) -> None:
        for job in jobs:
            self._waiting.remove(job)
            self._clients.leave(job.client)
            self._rules.leave((job.client, job.rule))


class _Shares(Generic[K]):
    """What each of those that are there has used, in seconds; who has neither a job nor a place is forgotten."""

    def __init__(self) -> None:
        self.used: dict[K, float] = {}
        self.held: Counter[K] = Counter()
        self._jobs: Counter[K] = Counter()

    def join(self, key: K) -> None:
        self.used.setdefault(key, min(self.used.values(), default=0.0))
        self._jobs[key] += 1

    def leave(self, key: K) -> None:
        self._jobs[key] -= 1
        self._forget_if_gone(key)

    def hold(self, key: K) -> None:
        self.held[key] += 1

    def release(self, key: K, seconds: float) -> None:
        self.held[key] -= 1
        self.used[key] += seconds
        self._forget_if_gone(key)

    def _forget_if_gone(self, key: K) -> None:
        if not self._jobs[key] and not self.held[key]:
            del self._jobs[key], self.held[key], self.used[key]
