"""Residency: which base model gives way to another one, and when. Pure decisions, in bytes and seconds.

A base model that is asked for gets its turn: for some time after it was loaded, those who use it keep it, so that a
client who alternates between base models cannot make the others wait for loads all the time. A turn is a multiple of
the time that the load took, so loading takes a bounded share of all time. A base model that nobody uses any more need
not wait for the end of its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TURN = 4.0
"""Length of a turn, as a multiple of the time that loading the base model took."""

GRACE_S = 1.0
"""A base model without requests is kept for so many seconds within its turn, because clients ask again at once; or for
the time that it took to load, if that is less."""


@dataclass(eq=False, slots=True)
class ResidentModel:
    """A base model, in memory or not. Times are in seconds of `time.monotonic`.

    Attributes:
        pinned: it never gives way.
        leaving: it gives way as soon as its requests have ended; new ones wait.
        users: requests that use it.
        used_at: when the last of them ended.
    """

    name: str
    pinned: bool = False
    loaded: bool = False
    leaving: bool = False
    weight_bytes: int = 0
    users: int = 0
    used_at: float = 0.0
    loaded_at: float = 0.0
    load_seconds: float = 0.0

    def may_leave_at(self) -> float:
        """When it may begin to give way to a base model that waits."""
        turn_ends = self.loaded_at + TURN * self.load_seconds
        return turn_ends if self.users else min(turn_ends, self.used_at + min(GRACE_S, self.load_seconds))


class Residency:
    """Decides for all base models of a process.

    Args:
        room_bytes: memory for the weights of all that are loaded.
    """

    def __init__(self, residents: Sequence[ResidentModel], room_bytes: int) -> None:
        self._residents = residents
        self.room_bytes = room_bytes

    def missing(self, wanted: ResidentModel) -> int:
        """Bytes that others have to give up before `wanted` can be loaded; 0 or less if none."""
        return wanted.weight_bytes + sum(each.weight_bytes for each in self._loaded()) - self.room_bytes

    def fits(self, wanted: ResidentModel) -> bool:
        """Whether `wanted` could be loaded if all others gave way that may."""
        pinned = sum(each.weight_bytes for each in self._loaded() if each.pinned)
        return wanted.weight_bytes + pinned <= self.room_bytes

    def next_to_leave(self, now: float) -> ResidentModel | None:
        """The base model that gives way next: of those without requests the least recently used one; else one that is
        leaving already; else the one that was loaded first. None if none may leave yet."""
        free = [each for each in self._loaded() if not each.pinned and each.may_leave_at() <= now]
        unused = [each for each in free if not each.users]
        if unused:
            return min(unused, key=lambda each: each.used_at)
        return min(free, key=lambda each: (not each.leaving, each.loaded_at), default=None)

    def ask_again_at(self) -> float | None:
        """When `next_to_leave` will have an answer if nothing changes; None if only a change can bring one."""
        return min((each.may_leave_at() for each in self._loaded() if not each.pinned), default=None)

    def unused_since(self, before: float) -> ResidentModel | None:
        """A base model that nobody has used since `before`."""
        unused = (each for each in self._loaded() if not (each.pinned or each.users) and each.used_at <= before)
        return next(unused, None)

    def unused_longest(self) -> float | None:
        """Since when nobody has used the base model that was used least recently; None if all are in use."""
        return min((each.used_at for each in self._loaded() if not (each.pinned or each.users)), default=None)

    def _loaded(self) -> list[ResidentModel]:
        return [each for each in self._residents if each.loaded]
