"""Training of the simplest kind, for tests of what runs it: `core.device.TrainingWork`."""

from __future__ import annotations

from collections.abc import Callable


class MicroSteps:
    """`left` micro-steps, each of which calls `step` with its number. A reset gives the rest up.

    `held`: bytes that it always has. `bytes_of_updates`: those of an update, until a reset.
    """

    peak_bytes = 0

    def __init__(self, left: int = 0, step: Callable[[int], object] = lambda number: None) -> None:
        self.left, self.step = left, step
        self.begun = self.done = self.resets = self.held = self.bytes_of_updates = 0

    @property
    def bytes_held(self) -> int:
        return self.held

    def waits(self) -> bool:
        return self.left > 0

    def pace(self, seconds: float) -> None:
        """Its units take no time."""

    def advance(self) -> None:
        number, self.begun = self.begun, self.begun + 1
        self.step(number)
        self.left -= 1
        self.done += 1

    def reset(self) -> None:
        self.left = self.bytes_of_updates = 0
        self.resets += 1
