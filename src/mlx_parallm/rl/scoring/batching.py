"""How many trajectories the scorers get at a time."""

from __future__ import annotations

_AIM_S = 0.25
"""Of scoring one batch. Rewards come back by batches, and while one is scored the next one gathers."""

_FOLLOW = 0.3
"""Weight of the newest batch in the running time of a trajectory."""


class BatchSize:
    """As many as are scored in about a quarter of a second, by what the last batches took; `most` at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._each: float | None = None  # seconds a trajectory

    @property
    def now(self) -> int:
        if not self._each:
            return self._most
        return min(max(int(_AIM_S / self._each), 1), self._most)

    def took(self, trajectories: int, seconds: float) -> None:
        """Books a batch that was answered."""
        each = seconds / trajectories
        self._each = each if self._each is None else self._each + _FOLLOW * (each - self._each)
