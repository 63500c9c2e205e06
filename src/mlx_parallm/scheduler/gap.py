"""The gap between two decode steps: what its time went to."""

from __future__ import annotations

_STAGING_SHARE = 0.12
"""Of a decode step's own time, for staging between two of them."""

_FOLLOW = 0.2
"""Weight of the newest step in the running time of a decode step."""


class Gap:
    """Since the last decode step was launched.

    `debt`: seconds that its rows have waited since. `staged`: those of them that went to staging. `clean`: none went
    to prefill or training.
    """

    def __init__(self) -> None:
        self.debt = 0.0
        self.staged = 0.0
        self.clean = True
        self._launched_at: float | None = None  # while there has been something to do since
        self._step_seconds = 0.0  # running time of a decode step itself

    def spend(self, seconds: float) -> None:
        """On making room for rows."""
        self.debt += seconds

    def stage(self, seconds: float) -> None:
        self.staged += seconds
        self.debt += seconds

    def work(self, seconds: float) -> None:
        """On prefill or training."""
        self.debt += seconds
        self.clean = False

    def may_stage(self, most: float) -> bool:
        """Whether staging has not had `most` seconds of this gap; it always gets one unit."""
        return self.staged == 0.0 or self.staged < most

    @property
    def interrupted(self) -> bool:
        """Whether there was more than decode in it."""
        return not self.clean or self.staged > 0.0

    @property
    def staging_share(self) -> float:
        """Seconds of each gap, for staging that is not urgent."""
        return _STAGING_SHARE * self._step_seconds

    def close(self, now: float) -> float | None:
        """A step is launched: its length from launch to launch, None after idle time, and a new gap begins."""
        before, self._launched_at = self._launched_at, now
        length = None if before is None else now - before
        if length is not None:
            own = max(length - self.debt, 0.0)
            self._step_seconds += _FOLLOW * (own - self._step_seconds)
        self.debt = self.staged = 0.0
        self.clean = True
        return length

    def idle(self) -> None:
        """No row waits for a step, so nothing is held up."""
        self._launched_at, self.debt, self.clean = None, 0.0, True
