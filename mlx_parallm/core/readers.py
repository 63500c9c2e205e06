"""Who reads and rewards trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _any(adapter: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Reader:
    """The API key for which trajectories are read or rewarded. It may do so with what it has sent itself, and with what
    the server has sampled for tasks of its own. What it may not read is to it as if it did not exist.

    Attributes:
        name: of the key.
        reads_all: it may also read and reward what other keys have sent.
        sees: whether it may know of the adapter with this name.
    """

    name: str
    reads_all: bool = False
    sees: Callable[[str], bool] = _any

    def may_read(self, owner: str | None) -> bool:
        """Whether it may read what the key with this name has sent; see `Trajectory.owner`."""
        return self.reads_all or owner in (self.name, "")

    @property
    def bound(self) -> str | None:
        """The key whose trajectories it may reward; None: those of all keys."""
        return None if self.reads_all else self.name


EVERYTHING = Reader("", reads_all=True)
"""The server itself."""
