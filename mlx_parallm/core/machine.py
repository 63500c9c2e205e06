"""The machine below the server: how short memory is, why training waits, and a clock that counts sleep."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from enum import IntEnum

_CLOCK = time.CLOCK_MONOTONIC if sys.platform == "darwin" else time.CLOCK_BOOTTIME


def seconds_with_sleep() -> float:
    """Seconds on a clock that counts while the machine sleeps, unlike `time.monotonic`, and that does not change when
    the system time is set."""
    return time.clock_gettime(_CLOCK)


class Relief(IntEnum):
    """What the server does about short memory. Each step includes those before it."""

    NONE = 0
    PREFIXES = 1
    """No cached prefixes are kept, and all memory that no row uses is given back."""
    ROLLOUTS = 2
    """Rollouts get no rows, and no automatic update begins."""
    REQUESTS = 3
    """New requests are refused."""


_RELIEFS = {
    Relief.PREFIXES: "no cached prefixes are kept",
    Relief.ROLLOUTS: "no cached prefixes are kept, and training waits",
    Relief.REQUESTS: "no cached prefixes are kept, training waits, and new requests are refused",
}


@dataclass(frozen=True, slots=True)
class MachineState:
    """The machine as it was last read, about once a second.

    Attributes:
        footprint: bytes of memory that this process takes; 0 if that is not known.
        footprint_limit: bytes above which memory counts as short; 0 if there is no guard.
        relief: what is done about it.
        shortage: why, for people; empty if nothing is done.
        training_waits_for: why no automatic update is made now, for people; empty if updates may run.
    """

    footprint: int = 0
    footprint_limit: int = 0
    relief: Relief = Relief.NONE
    shortage: str = ""
    training_waits_for: str = ""

    @property
    def relief_text(self) -> str:
        """What is done about short memory, and why, as a sentence; empty if nothing is."""
        return f"Memory is short ({self.shortage}): {_RELIEFS[self.relief]}." if self.relief else ""

    @property
    def notices(self) -> tuple[str, ...]:
        """What people should know now: a sentence for each."""
        waits = f"Training waits: {self.training_waits_for}." if self.training_waits_for else ""
        return tuple(text for text in (self.relief_text, waits) if text)


UNKNOWN_MACHINE = MachineState()
"""Before the first reading, and where none is taken."""
