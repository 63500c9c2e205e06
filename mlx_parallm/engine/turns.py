"""Turns: base models that share the device take turns, one unit of work at a time.

The next unit is of the one that has had the least device time among those with work. A base model that is being loaded
takes turns with the others, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

_ASK_AGAIN_S = 0.05
"""While others have work, one without is asked again for work after so many seconds."""


@dataclass(eq=False, slots=True)
class _Member:
    """An engine, or a load.

    Attributes:
        step: runs one unit. False if there is none.
        rest: called before somebody else's unit runs.
        seconds: device time so far. What was idle for a while counts as having had as much as the others.
        ask_at: when it is asked for work again, if it had none.
    """

    step: Callable[[], bool]
    rest: Callable[[], None]
    seconds: float
    busy: bool = True
    ask_at: float = 0.0


class Turns:
    """Who runs the next unit. Device thread only."""

    def __init__(self) -> None:
        self._members: dict[Hashable, _Member] = {}
        self._current: _Member | None = None

    def add(self, key: Hashable, step: Callable[[], bool], rest: Callable[[], None] = lambda: None) -> None:
        """Adds a member. `step` runs one unit, or returns False if there is none; `rest` is called before a unit of
        another one."""
        self._members[key] = _Member(step, rest, self._least_seconds())

    def remove(self, key: Hashable) -> None:
        """Removes a member, which may be the one that runs now."""
        if self._members.pop(key) is self._current:
            self._current = None

    def wake(self, key: Hashable) -> None:
        """Notes that a member has work again."""
        self._wake(self._members[key])

    def step(self) -> bool:
        """Runs the next unit of device work. False if there is none."""
        now, members = time.monotonic(), sorted(self._members.values(), key=lambda each: each.seconds)
        due = [each for each in members if each.busy or each.ask_at <= now]
        return any(map(self._run, due)) or any(self._run(each) for each in members if each not in due)

    def interrupt(self) -> None:
        """Lets the member that ran last rest, because something else runs now, which may make work for any of them."""
        if self._current is not None:
            self._current.rest()
        for member in self._members.values():
            member.ask_at = 0.0

    def _run(self, member: _Member) -> bool:
        if self._current is not None and self._current is not member:
            self._current.rest()
        self._current, started = member, time.monotonic()
        worked = member.step()
        now = time.monotonic()
        if worked:
            self._wake(member)
        member.busy, member.ask_at = worked, now + _ASK_AGAIN_S
        member.seconds += now - started
        return worked

    def _wake(self, member: _Member) -> None:
        if not member.busy:
            member.busy, member.seconds = True, max(member.seconds, self._least_seconds())

    def _least_seconds(self) -> float:
        return min((member.seconds for member in self._members.values() if member.busy), default=0.0)
