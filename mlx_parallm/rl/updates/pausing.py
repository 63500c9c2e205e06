"""Pausing: whether an adapter is updated automatically, and why not."""

from __future__ import annotations

from collections.abc import Coroutine

from mlx_parallm.errors import StorageError
from mlx_parallm.rl.events import Emit


class Pausing:
    """Pauses automatic updates: when asked, after `most_failures` updates in a row that were skipped or held, while the
    journal cannot be written, and while the machine should not train.

    Attributes:
        failures: updates in a row that were skipped or held.
    """

    def __init__(self, name: str, emit: Emit, most_failures: int) -> None:
        self.failures = 0
        self._name = name
        self._emit = emit
        self._most_failures = most_failures
        self._paused: str | None = None  # until `resume`
        self._held = ""  # until the machine may train again

    @property
    def reason(self) -> str | None:
        """Why they are paused; None: they are not."""
        return self._paused or self._held or None

    def _change(self, paused: str | None, held: str) -> None:
        before, self._paused, self._held = self.reason, paused, held
        if self.reason == before:
            return
        if self.reason is None:
            self._emit("resumed", adapter=self._name)
        else:
            self._emit("paused", adapter=self._name, reason=self.reason)

    def pause(self, reason: str) -> None:
        self._change(self._paused or reason, self._held)

    def hold(self, reason: str) -> None:
        """Pauses updates until the next call, with "" for the reason."""
        self._change(self._paused, reason)

    def resume(self) -> bool:
        """Ends a pause, but not `hold`. Returns whether there was one."""
        if self._paused is None:
            return False
        self.failures = 0
        self._change(None, self._held)
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
