"""Decides when staging and training run beside requests, by their budgets of time."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_parallm.core import DeviceSchedule, Sequence
from mlx_parallm.scheduler.prefill import EVEN, overdue
from mlx_parallm.scheduler.timing import DecodeGap, ShareMeter, TrainingShare
from mlx_parallm.scheduler.units import Candidate, StagingUnit, TrainingUnit, WorkKind


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
