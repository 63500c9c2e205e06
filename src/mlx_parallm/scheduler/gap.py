"""The gap between two decode steps: what its time went to."""

from __future__ import annotations

from dataclasses import dataclass

_STAGING_SHARE = 0.12
"""Of a decode step's own time, for staging between two of them."""

_FOLLOW = 0.2
"""Weight of the newest step in the running time of a decode step."""


@dataclass(frozen=True, slots=True)
class ClosedGap:
    """From one launch of a decode step to the next. `step_seconds`: of it, what the step itself took.

    `interrupted`: something other than decode ran in it.
    """

    seconds: float
    step_seconds: float
    interrupted: bool


class Gap:
    """Since the last decode step was launched.

    `waited`: seconds that its rows have waited for other work since. `staged`: those of them that went to staging.
    `clean`: none went to prefill or training. `training_put_off`: training was due in it and made way for prompts;
    `training_was_put_off`: so it was in the gap before.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self.staged = 0.0
        self.clean = True
        self.training_put_off = self.training_was_put_off = False
        self._launched_at: float | None = None  # while there has been something to do since
        self._step_seconds = 0.0  # running time of a decode step itself

    def add_wait_time(self, seconds: float) -> None:
        """Adds time that went to making room for rows, or to messages."""
        self.waited += seconds

    def add_staging(self, seconds: float) -> None:
        """Adds a unit of staging."""
        self.staged += seconds
        self.waited += seconds

    def add_work(self, seconds: float) -> None:
        """Adds a unit of prefill or training."""
        self.waited += seconds
        self.clean = False

    def may_stage(self, most: float) -> bool:
        """Whether staging has had less than `most` seconds of this gap; it always gets one unit."""
        return self.staged == 0.0 or self.staged < most

    def left(self, budget: float) -> float:
        """Seconds of `budget` that rows may still wait for their next step."""
        return max(budget - self.waited, 0.0)

    def has_room(self, budget: float) -> bool:
        """Whether less than half of `budget` has been used: what is long waits for the next gap."""
        return self.left(budget) > 0.5 * budget

    def is_fresh(self, budget: float) -> bool:
        """Whether it has held neither prefill nor training, and has room for a unit of any length."""
        return self.clean and self.has_room(budget)

    @property
    def interrupted(self) -> bool:
        """Whether there was more than decode in it."""
        return not self.clean or self.staged > 0.0

    @property
    def staging_share(self) -> float:
        """Seconds of each gap for staging that is not urgent."""
        return _STAGING_SHARE * self._step_seconds

    def close(self, now: float) -> ClosedGap | None:
        """Ends this gap, for a step is launched, and begins the next. None after idle time."""
        closed = None
        if self._launched_at is not None:
            length = now - self._launched_at
            closed = ClosedGap(length, max(length - self.waited, 0.0), self.interrupted)
            self._step_seconds += _FOLLOW * (closed.step_seconds - self._step_seconds)
        self._launched_at, self.waited, self.staged, self.clean = now, 0.0, 0.0, True
        self.training_was_put_off, self.training_put_off = self.training_put_off, False
        return closed

    def begin_turns(self) -> None:
        """Prefill has run and no row can decode, so no step closes this gap: staging and training have their turns."""
        self.staged, self.clean = 0.0, True

    def idle(self) -> None:
        """No row waits for a step, so nothing is held up."""
        self._launched_at, self.waited, self.clean = None, 0.0, True
