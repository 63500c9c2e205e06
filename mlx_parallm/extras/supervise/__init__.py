"""`mlx_parallm_serve --supervise`: a process that runs the server as its child, and starts it again if it ends.

    supervisor (`parent`)                     server (`child`)
    what clients had changed  ──▶ socket ──▶  restores that, then serves
    keeps the newest report   ◀── socket ◀──  an empty line each second; what a client has changed, before it hears so

A server that gives no sign of life is killed first. What clients have changed is in the supervisor's memory alone: when
that ends, it is gone, and a start by hand begins with the flags.
"""

import os
from dataclasses import dataclass

from mlx_parallm.core.device import DeviceSchedule

VARIABLE = "SUPERVISED_MLX_PARALLM"
"""The environment variable of the child with the number of its end of the socket."""


def is_child() -> bool:
    """Whether a supervisor has started this process."""
    return VARIABLE in os.environ


@dataclass(frozen=True)
class LoadedAdapter:
    """The live version of an adapter from a folder.

    Attributes:
        adapter: `name@version`.
        folder: where its files are.
        digest: identifies their content.
        base: the base model that it is for.
    """

    adapter: str
    folder: str
    digest: str
    base: str


@dataclass(frozen=True)
class Changes:
    """What clients have changed since the start, or all that they could have changed.

    Attributes:
        adapters: that are loaded.
        unloaded: names of adapters that the start has found.
        route: of requests that name no adapter; None: as at the start.
        schedule: the same of how requests and training share the device.
    """

    adapters: tuple[LoadedAdapter, ...] = ()
    unloaded: tuple[str, ...] = ()
    route: dict[str, float] | None = None
    schedule: DeviceSchedule | None = None


@dataclass(frozen=True)
class Beginning:
    """What a supervisor tells a server.

    Attributes:
        restarts: how many times it has started a server again.
        reason: of the last time.
        changes: to be restored.
    """

    restarts: int = 0
    reason: str = ""
    changes: Changes = Changes()


@dataclass(frozen=True)
class Report:
    """What a server tells its supervisor, besides that it lives.

    Attributes:
        changes: what clients have changed.
        ends: it ends now, for this reason, which may be empty; None: it serves.
    """

    changes: Changes = Changes()
    ends: str | None = None
