"""Pausing: whether an adapter is updated automatically, and why not."""

from __future__ import annotations

from collections.abc import Coroutine

from mlx_parallm.errors import StorageError
from mlx_parallm.rl.events import Emit


class Pausing:
    """Pauses automatic updates: when asked, after `most_failures` updates in a row that were skipped or held, and while
    the journal cannot be written.

    Attributes:
        reason: why they are paused; None: they are not.
        failures: updates in a row that were skipped or held.
    """

    def __init__(self, name: str, emit: Emit, most_failures: int) -> None:
        self.reason: str | None = None
        self.failures = 0
        self._name = name
        self._emit = emit
        self._most_failures = most_failures

    def pause(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self._emit("paused", adapter=self._name, reason=reason)

    def resume(self) -> bool:
        """Returns whether they were paused."""
        if self.reason is None:
            return False
        self.reason = None
        self.failures = 0
        self._emit("resumed", adapter=self._name)
        return True

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self, reason: str) -> None:
        """An update was skipped or held."""
        self.failures += 1
        if self.failures >= self._most_failures:
            self.pause(f"{self.failures} updates in a row were skipped or held, the last one: {reason}")

    async def recorded(self, writing: Coroutine[None, None, None]) -> None:
        """Waits until a change is in the journal. If that fails, updates pause: the change is made, and the next one
        has to wait until the disk takes it."""
        try:
            await writing
        except StorageError as error:
            self.pause(str(error))
