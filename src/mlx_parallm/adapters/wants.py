"""Versions that are to be brought into a slot, and who is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_parallm.adapters.versions import Version
from mlx_parallm.core import AdapterRef

READ_AHEAD = 2
"""Versions that are read from their files, and kept, before there is a slot for them."""

Told = Callable[[Exception | None], None]
"""Told when something has been done, or why it cannot be."""


@dataclass(eq=False, slots=True)
class Want:
    """A version that waits for a slot. `staged` is called when it has one, or with the error. `urgent`: before others.
    `faults`: times that the device failed to stage it."""

    version: Version
    since: float
    urgent: bool = False
    faults: int = 0
    staged: list[Told] = field(default_factory=list)

    def settle(self, error: Exception | None) -> None:
        """Tells whoever is to be told, once."""
        told, self.staged = self.staged, []
        for staged in told:
            staged(error)


class Wants:
    """One for each version."""

    def __init__(self) -> None:
        self._wants: dict[AdapterRef, Want] = {}

    def __contains__(self, ref: AdapterRef) -> bool:
        return ref in self._wants

    def __len__(self) -> int:
        return len(self._wants)

    def get(self, ref: AdapterRef) -> Want | None:
        return self._wants.get(ref)

    def add(self, version: Version, urgent: bool = False) -> Want:
        """The want of this version; a new one where there is none."""
        return self._wants.setdefault(version.ref, Want(version, time.monotonic(), urgent))

    def drop(self, ref: AdapterRef) -> None:
        """It may have lapsed already."""
        self._wants.pop(ref, None)

    def drop_lapsed(self, held: Callable[[AdapterRef], object]) -> None:
        """Those that nobody waits for any more: no request holds the version, and nobody is to be told."""
        for ref, want in list(self._wants.items()):
            if not want.staged and not held(ref):
                del self._wants[ref]

    @property
    def urgent(self) -> bool:
        return any(want.urgent for want in self._wants.values())

    def in_order(self) -> list[Want]:
        """The urgent ones, then the oldest."""
        return sorted(self._wants.values(), key=lambda want: (not want.urgent, want.since))

    def next(self) -> list[Want]:
        """Those whose weights are to be in memory."""
        return self.in_order()[:READ_AHEAD]

    def no_later_than(self, want: Want) -> int:
        """How many are as old as `want`, itself among them."""
        return sum(other.since <= want.since for other in self._wants.values())
