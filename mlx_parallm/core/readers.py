"""Who reads, trains and rewards: an API key, or the server itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_parallm.errors import UnknownModelError, shown


def _any(adapter: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Reader:
    """The API key for which something is done. Of trajectories, it may read and reward what it has sent itself, and
    what the server has sampled for tasks of its own. All else is unknown to it.

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

    def named(self, adapter: str | None, default: str) -> str:
        """The name of the adapter that it means; None: `default`.

        Raises:
            UnknownModelError: it does not see that.
        """
        name = default if adapter is None else adapter
        if self.sees(name):
            return name
        if adapter is None:
            raise UnknownModelError("This key may not use the default adapter; name another one.")
        raise UnknownModelError(f"No adapter is called {shown(adapter)}; see GET /v1/adapters.")

    @property
    def bound(self) -> str | None:
        """The key whose trajectories it may reward; None: those of all keys."""
        return None if self.reads_all else self.name


EVERYTHING = Reader("", reads_all=True)
"""The server itself."""
