"""A share of device time for work whose units are long and cannot be cut."""

from __future__ import annotations


class TimeShare:
    """Spaces units so that beside other work they take `share`, in (0, 1], of the time, as long as some wait."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._due_at = 0.0
        self._waited = False

    def is_due(self, now: float, waits: bool) -> bool:
        """Whether the next unit may run though there is other work. Ask whenever a unit is picked."""
        if not self._waited:
            self._due_at = max(self._due_at, now)  # time that could not be used is not saved up
        self._waited = waits
        return waits and now >= self._due_at

    def ran(self, seconds: float, now: float) -> None:
        """Books a unit that has ended. The next is due `seconds` / share after this one was, or began if that was
        sooner: time that it came too late is made up for, at most by the next one's own wait."""
        self._due_at = max(min(self._due_at, now - seconds) + seconds / self._share, now)
