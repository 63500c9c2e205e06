"""Budgets for the time between decode steps, and when staging and training run beside requests.

All times are in seconds on one monotonic clock. A step is a forward unit with decode rows. Its rows wait for staging
and training that run before it, and for the chunks of prompts in it; all of these share one budget.

forward unit ──▶ staging, training ──▶ the next one: decode rows, and chunks of prompts
             └─────────────────── DecodeGap ─────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable

from mlx_parallm.core import DECODE_GAPS, TRAINING_SHARES, DeviceSchedule, Histogram
from mlx_parallm.engine.prefill import EVEN, overdue
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.engine.units import Candidate, StagingUnit, TrainingUnit, WorkKind

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


class WorkBesideRequests:
    """Owns the budgets of the candidates: a share of each gap for staging, and a share of time for training.

    `gap`: the time since the last forward unit. `share_meter`: measures the share of time that training got.
    """

    def __init__(self, schedule: DeviceSchedule) -> None:
        self.gap = DecodeGap(schedule.max_decode_stall_s)
        self.share_meter = ShareMeter()
        self._share = TrainingShare(schedule.training_time_share)
        self._staging: Candidate | None = None
        self._training: Candidate | None = None
        self._training_is_due = False

    def reschedule(self, schedule: DeviceSchedule) -> None:
        """Applies a new schedule from the next unit on."""
        self.gap.stall_s = schedule.max_decode_stall_s
        self._share.share = schedule.training_time_share

    def update(self, now: float, candidates: Iterable[Candidate], requests_run: bool) -> None:
        """Notes what waits. Call it once for each unit that is chosen.

        Args:
            requests_run: whether any request holds a row and may use the device.
        """
        waiting = {candidate.kind: candidate for candidate in candidates}
        self._staging, self._training = waiting.get(WorkKind.STAGING), waiting.get(WorkKind.TRAINING)
        self._training_is_due = self._share.is_due(now, self._training is not None)
        self.share_meter.update(now, contended=self._training is not None and requests_run)

    @property
    def training_waits(self) -> bool:
        """Whether training has a unit to run."""
        return self._training is not None

    def next_unit(
        self, now: float, live: bool, decoding: list[Sequence], prompts: list[Sequence]
    ) -> StagingUnit | TrainingUnit | None:
        """The unit that runs before the next forward unit, or None.

        Args:
            live: whether any sequence holds a row.
            decoding, prompts: the rows that the forward unit would decode, and those in prefill.
        """
        urgent = self._staging is not None and self._staging.due <= now
        if self._staging and (not live or self.gap.may_stage(urgent, bool(decoding))):
            return StagingUnit(min(self._staging.seconds, self.gap.staging_left(urgent)))
        if self._training and self._training_is_due and self._training_fits(bool(decoding), prompts):
            return TrainingUnit(min(self._training.seconds, self.gap.remaining_s if decoding else self.gap.stall_s))
        return None

    def idle_unit(self, others_run: bool = False) -> StagingUnit | TrainingUnit | None:
        """The unit to run when no request of this base model can use the time, or None. `others_run`: those of another
        one can."""
        self.gap.idle()
        if self._staging:
            return StagingUnit(0.0)
        if self._training is None or (others_run and not self._training_is_due):
            return None
        return TrainingUnit(min(self._training.seconds, self.gap.stall_s))

    def record_training(self, seconds: float, now: float) -> None:
        """Records a training unit that took `seconds` and ended at `now`."""
        self._share.add_unit(seconds, now)
        self.share_meter.add_unit(seconds)
        self.gap.add_training(seconds)

    def _training_fits(self, rows_wait: bool, prompts: list[Sequence]) -> bool:
        """Whether a training unit that is due runs now.

        While rows decode, it needs a fresh gap, so that no gap holds two training units. It gives way to overdue
        prompts, but not in two gaps in a row. While no row can decode, it takes turns with prefill.
        """
        if not rows_wait:
            return not (self.gap.trained and prompts)
        if not self.gap.is_fresh:
            return False
        if not self.gap.training_gave_way_before and overdue(prompts, EVEN):
            self.gap.training_gave_way = True
        return not self.gap.training_gave_way
