"""The roles of keys, and what a route needs of a key. Each route says it beside its handler; see `server.routing`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """The roles of a key. Each may do what those before it may do."""

    INFERENCE = "inference"
    """Asks the model, and reads its own stored responses."""
    TRAIN = "train"
    """Also teaches: collects trajectories, sends rewards, controls training, and loads, publishes and rolls back
    adapters."""
    ADMIN = "admin"
    """Also stops and changes the server for everybody, and reads other people's prompts and usage."""

    def allows(self, needed: Role) -> bool:
        """Whether a key of this role may do what needs `needed`."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Access:
    """What a route needs of a key.

    Attributes:
        role: the least role; None: no key is needed.
        audited: whether it is a control action, which the audit log records.
    """

    role: Role | None
    audited: bool = False


UNDECLARED = Access(Role.ADMIN, audited=True)
"""What a route needs that does not say it."""
