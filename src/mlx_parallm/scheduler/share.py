"""A share of device time for work whose units are long and cannot be cut."""

from __future__ import annotations


class TimeShare:
    """Spaces units so that beside other work they take `share`, in (0, 1], of the time, as long as some wait.

    A new share counts from the last unit on.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._began = 0.0  # when the last unit was due, or began if that was sooner
        self._seconds = 0.0  # that it took
        self._ended = 0.0
        self._waited = False

    @property
    def _due_at(self) -> float:
        """Time that the last unit came too late is made up for, at most by its own length."""
        return max(self._began + self._seconds / self.share, self._ended)

    def is_due(self, now: float, waits: bool) -> bool:
        """Whether the next unit may run though there is other work. Ask whenever a unit is picked."""
        if not self._waited and now > self._due_at:
            self._began, self._seconds = now, 0.0  # time that could not be used is not saved up
        self._waited = waits
        return waits and now >= self._due_at

    def ran(self, seconds: float, now: float) -> None:
        """Books a unit that has ended."""
        self._began, self._seconds, self._ended = min(self._due_at, now - seconds), seconds, now
