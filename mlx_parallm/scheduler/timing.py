"""Budgets for the time between decode steps, and training's share of device time.

All times are in seconds on one monotonic clock. A step is a forward unit with decode rows. Its rows wait for staging
and training that run before it, and for the chunks of prompts in it; all of these share one budget.

forward unit ──▶ staging, training ──▶ the next one: decode rows, and chunks of prompts
             └─────────────────── DecodeGap ─────────────────────────────────────────┘
"""

from __future__ import annotations

from mlx_parallm.core import DECODE_GAPS, TRAINING_SHARES, Histogram

_STAGING_SHARE = 0.12
"""Staging time allowed between two steps, as a share of a step's own time."""

_CHUNK_STALL_S = 0.3
"""Longest time that chunks of prompts may add to a step, in seconds, even if the stall budget is larger."""

_NEWEST_STEP = 0.2
"""Weight of the newest step in the running average of a step's own time."""

_POOLING_SHARE = 0.15
"""Share of the time of steps that prompts whose hidden states are pooled get. Unlike a prompt that waits for its first
token, they come by the hundred, and nobody reads along."""

_WINDOW_S = 10.0
"""Length of the windows in which training's share of time is measured."""


class DecodeGap:
    """The time since the last forward unit was launched, and the budget for what delays the rows of the next one.

    `stall_s`: seconds by which other work may delay a step; units are sized to what is left of it. `waited_s`: seconds
    of other work in this gap. `staged_s`: the part that staging took. `trained`: a training unit ran in this gap.
    `training_gave_way`: a training unit was due in this gap and gave way to prompts; `training_gave_way_before`: one
    did in the gap before, so it runs in this one. `lengths`: the times from the end of each step to the end of the
    next one, without those in which no row waited.
    """

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self.waited_s = self.staged_s = 0.0
        self.trained = self.training_gave_way = self.training_gave_way_before = False
        self.lengths: Histogram = DECODE_GAPS
        self._stepped_at: float | None = None  # the end of the last step; None when no row waited since
        self._step_seconds = 0.0  # running average of a step's own time

    def add_wait_time(self, seconds: float) -> None:
        """Adds time that went to messages or to the admission of rows."""
        self.waited_s += seconds

    def add_staging(self, seconds: float) -> None:
        """Adds a unit of staging."""
        self.staged_s += seconds
        self.waited_s += seconds

    def add_training(self, seconds: float) -> None:
        """Adds a unit of training."""
        self.waited_s += seconds
        self.trained = True

    @property
    def chunk_s(self) -> float:
        """Seconds that chunks of prompts may take in one unit."""
        return min(_CHUNK_STALL_S, self.stall_s)

    @property
    def remaining_s(self) -> float:
        """The part of `stall_s` that is left: how long rows may still wait for their next step."""
        return max(self.stall_s - self.waited_s, 0.0)

    @property
    def is_half_free(self) -> bool:
        """Whether less than half of the budget is used."""
        return self.remaining_s > 0.5 * self.stall_s

    @property
    def is_fresh(self) -> bool:
        """Whether the gap has held no training yet and has time for a unit of any length."""
        return not self.trained and self.is_half_free

    @property
    def interrupted(self) -> bool:
        """Whether staging or training ran in this gap."""
        return self.trained or self.staged_s > 0.0

    def may_stage(self, urgent: bool, rows_wait: bool) -> bool:
        """Whether staging may run now, because it has not used its share of this gap. Its first unit is always allowed,
        unless rows wait for a step and training took half of the budget.

        If staging had no limit, versions that compete for the same slots could be staged in turns forever, because the
        rows that hold the slots would never end.
        """
        if rows_wait and self.trained and not self.is_half_free:
            return False
        return self.staged_s == 0.0 or self.staging_left(urgent) > 0.0

    def staging_left(self, urgent: bool) -> float:
        """Seconds of this gap that are left for staging: of the whole budget if it is urgent, else of a small share."""
        allowance = self.stall_s if urgent else _STAGING_SHARE * self._step_seconds
        return max(allowance - self.staged_s, 0.0)

    def close(self) -> None:
        """Ends this gap with the launch of a forward unit, and begins the next one."""
        self.waited_s = self.staged_s = 0.0
        self.trained = False
        self.training_gave_way_before, self.training_gave_way = self.training_gave_way, False

    def add_step(self, seconds: float, now: float) -> None:
        """Records a step that took `seconds` and ended at `now`."""
        self._step_seconds += _NEWEST_STEP * (seconds - self._step_seconds)
        if self._stepped_at is not None:
            self.lengths = self.lengths.with_value(now - self._stepped_at)
        self._stepped_at = now

    def no_row_waited(self) -> None:
        """Forgets when the last step ended: nothing that ran since then has delayed a row."""
        self._stepped_at = None

    def idle(self) -> None:
        """Forgets the gap: no request has work for the device."""
        self.no_row_waited()
        self.waited_s = self.staged_s = 0.0
        self.trained = False


class PoolingShare:
    """The share of time of prompts whose hidden states are pooled: that of the steps so far, less what they took.

    As long as something is left, they may take a whole chunk, and then wait until their share has made up for it.

    seconds: what is left; at most `most`, because what was not used is not saved up for long.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def add_step(self, seconds: float, pooled: float, most: float) -> None:
        """Records a step that took `seconds`, of which these prompts took about `pooled`."""
        self.seconds = min(self.seconds + _POOLING_SHARE * seconds - pooled, most)


class TrainingShare:
    """Spaces training units so that they take `share`, in (0, 1], of device time while rows decode.

    Training units are long and cannot be interrupted, so the share is kept by the time between them. A new share
    applies already to the time after the last unit.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._began = 0.0  # when the last unit was due, or when it began if that was earlier
        self._seconds = 0.0  # how long it took
        self._ended = 0.0
        self._waited = False

    @property
    def _due_at(self) -> float:
        """When the next unit is due, counted from when the last one was due, not from when it began. So after a late
        unit the next one comes sooner, but not before the late one has ended."""
        return max(self._began + self._seconds / self.share, self._ended)

    def is_due(self, now: float, waits: bool) -> bool:
        """Whether the next training unit may run beside other work. Call it for each unit that is chosen.

        Args:
            waits: whether training has a unit to run.
        """
        if not self._waited and now > self._due_at:
            self._began, self._seconds = now, 0.0  # unused time is not saved up
        self._waited = waits
        return waits and now >= self._due_at

    def add_unit(self, seconds: float, now: float) -> None:
        """Records a unit that took `seconds` and ended at `now`."""
        self._began, self._seconds, self._ended = min(self._due_at, now - seconds), seconds, now


class ShareMeter:
    """Measures training's share of device time in windows of 10 seconds.

    `last`: the share in the last window. `contended`: the shares in windows throughout which both rows and training
    wanted the device.
    """

    def __init__(self) -> None:
        self.last = 0.0
        self.contended: Histogram = TRAINING_SHARES
        self._began: float | None = None
        self._trained = 0.0
        self._all_contended = True

    def update(self, now: float, contended: bool) -> None:
        """Notes whether rows and training both want the device now. Call it for each unit that is chosen."""
        if self._began is None:
            self._began = now
        self._all_contended = self._all_contended and contended
        if now - self._began < _WINDOW_S:
            return
        self.last = self._trained / (now - self._began)
        if self._all_contended:
            self.contended = self.contended.with_value(self.last)
        self._began, self._trained, self._all_contended = now, 0.0, True

    def add_unit(self, seconds: float) -> None:
        """Records a training unit."""
        self._trained += seconds
