"""RLAwareScheduler chooses the next unit of device work. It decides in tokens, rows and seconds, without arrays.

    waiting ──admit──▶ prefilling ──last chunk──▶ running ──▶ finished
       ▲                   │                         │
       └── preempted (youngest first, computed again) ◀──┘

Decode runs whenever a row can draw a token. Between two decode steps, prefill gets about `DecodeGap.prefill_s` seconds;
the prompt with the least left goes first, and waiting counts in its favour. The time between two decode steps is a gap.
Staging, which copies adapters into the bank, gets a share of each gap. A training unit runs in a gap when its share of
time is due. Both use all the time that no row can use. Rollouts yield to live requests: they get their share of a
step's rows, their prompts come last, and their rows are preempted first.

Invariants:
- Units cannot be interrupted. Therefore a stall is bounded by what runs between two decode steps: units sized by
  prediction to the stall budget, or one smallest chunk when even that is predicted to take longer.
- No prompt with a row passes 8 decode steps without a chunk, whatever is predicted and whatever else waits.
- A sequence without a row waits for rows or for memory, never because of a prediction. Predictions only order the
  queue.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mlx_parallm.core import DeviceSchedule, SequenceState, SequenceStatus, WorkClass
from mlx_parallm.scheduler.prefill import CostModel, PrefillPacker, overdue
from mlx_parallm.scheduler.sequences import (
    Urgency,
    WaitingQueue,
    advance,
    check_rows,
    decoding,
    prefilling,
    to_preempt,
)
from mlx_parallm.scheduler.timing import DecodeGap, ShareMeter, TrainingShare
from mlx_parallm.scheduler.units import (
    NO_OTHER_WORK,
    Chunk,
    DecodeUnit,
    OtherWork,
    PrefillUnit,
    RowMemory,
    StagingUnit,
    TrainingUnit,
    Unit,
    UnlimitedMemory,
)

_WAIT_CREDIT = 10.0
"""Seconds of remaining prefill that one second of waiting outweighs. A chunk served in turn restarts the wait, so a
long prompt beside a stream of short ones gets a chunk now and then, and not all the time."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler. `max_rows`: rows of the batch. `max_batched_tokens`: tokens of one prefill unit."""

    max_rows: int = 128
    max_batched_tokens: int = 2048
    schedule: DeviceSchedule = field(default_factory=DeviceSchedule)


class RLAwareScheduler:
    """Owns the waiting queue and the live rows. Device thread only.

    Args:
        memory: where rows come from; None is memory without limits.
        cost: predicts the seconds of prefill units. The scheduler corrects it by observed times.
    """

    def __init__(
        self, config: SchedulerConfig | None = None, memory: RowMemory | None = None, cost: CostModel | None = None
    ) -> None:
        self.config = config = config or SchedulerConfig()
        self.cost = cost = cost or CostModel()
        self.schedule = config.schedule
        self.gap = DecodeGap(config.schedule.max_decode_stall_s)
        self.share_meter = ShareMeter()
        self.preemptions = 0
        self.paused = False
        self._memory = memory or UnlimitedMemory()
        self._waiting = WaitingQueue(self._urgency)
        self._rows: list[SequenceState] = []  # in order of admission: the last one is the youngest
        self._packer = PrefillPacker(cost, config.max_batched_tokens)
        self._training = TrainingShare(config.schedule.training_time_share)
        self._last_step: list[Chunk] = []  # the work of the decode step launched last
        self._frozen = False
        self._memory_is_short = False  # True from a preemption for memory until a sequence ends

    def reschedule(self, schedule: DeviceSchedule) -> None:
        """Applies a new schedule from the next unit on."""
        self.schedule = schedule
        self.gap.stall_s = schedule.max_decode_stall_s
        self._training.share = schedule.training_time_share

    def pause(self, freeze: bool) -> None:
        """Holds back sequences that are added until `resume`. With `freeze`, the others get no rows and no units."""
        self.paused, self._frozen = True, freeze

    def resume(self) -> None:
        self.paused = self._frozen = False
        self._waiting.release()

    # -- sequences -------------------------------------------------------------------------------

    def add(self, sequence: SequenceState) -> None:
        self._waiting.add(sequence, held=self.paused)

    def finish(self, sequence: SequenceState) -> None:
        """Ends a sequence in any state and frees its row at once."""
        self._memory_is_short = False
        before, sequence.status = sequence.status, SequenceStatus.FINISHED
        sequence.group.members.remove(sequence)
        if before is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        else:
            self._free_row(sequence)

    def preempt(self, sequence: SequenceState) -> None:
        """Takes a live sequence's row away. It waits again, keeps its age, and is computed from its start."""
        self._free_row(sequence)
        sequence.computed = 0
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)
        self.preemptions += 1

    def _free_row(self, sequence: SequenceState) -> None:
        self._rows.remove(sequence)
        self._memory.free(sequence)

    def admit(self) -> None:
        """Gives rows to waiting sequences, best first, until rows or memory run out.

        After a preemption nothing is admitted until a sequence ends. Otherwise the memory taken from a row would be
        given back to the same sequence, and its prompt would be computed again and again. Work classes that already
        hold their share of rows come last. A row starts as a copy of a running row of its group if there is one.
        """
        shares, most = self.schedule.row_shares, self.config.max_rows
        if self._frozen or (self._memory_is_short and self._rows) or len(self._rows) >= most:
            return
        lanes = [lane for lane in self._waiting.lanes() if self._memory.ready(lane.adapter)]
        if not lanes:
            return
        held = Counter(row.work_class for row in self._rows)
        while len(self._rows) < most:
            over_share = [each for each in WorkClass if held[each] >= shares[each] * most]
            best = self._waiting.best(lanes, over_share)
            if best is None:
                return
            source = next((s for s in best.group.members if s.status is SequenceStatus.RUNNING), None)
            computed = self._memory.allocate(best, source)
            if computed is None:
                return
            self._waiting.remove(best)
            self._rows.append(best)
            held[best.work_class] += 1
            best.computed = best.steps_waited = 0
            advance(best, computed)

    # -- the next unit ---------------------------------------------------------------------------

    def next_unit(self, now: float, other: OtherWork = NO_OTHER_WORK) -> Unit | None:
        """Chooses the next unit of device work. Call `admit` before.

        Args:
            now: `time.monotonic()`.
            other: the work that waits beside requests.

        Returns:
            None when there is nothing to do but wait.
        """
        rows = decoding(self._rows, self.schedule.row_shares)
        self.share_meter.update(now, contended=other.training and bool(self._rows) and not self._frozen)
        training_is_due = self._training.is_due(now, other.training)
        if self._frozen:
            return self._without_rows(other)
        if other.staging and (not self._rows or self.gap.may_stage(other.staging_is_urgent, bool(rows))):
            return StagingUnit(self.gap.staging_left(other.staging_is_urgent))
        if training_is_due and self._training_fits(bool(rows)):
            return TrainingUnit(self.gap.remaining_s if rows else self.gap.stall_s)
        return self._next_prefill(bool(rows)) or self._next_decode(rows) or self._without_rows(other)

    def _training_fits(self, rows_wait: bool) -> bool:
        """Whether a training unit that is due runs now.

        While rows decode, it needs a fresh gap, so that no gap holds two training units, or prefill and then training.
        It gives way to prompts at their limit, but not in two gaps in a row. While no row can decode, it takes turns
        with prefill.
        """
        if not rows_wait:
            return not (self.gap.has_long_unit and prefilling(self._rows))
        if not self.gap.is_fresh:
            return False
        if not self.gap.training_gave_way_before and overdue(prefilling(self._rows)):
            self.gap.training_gave_way = True
        return not self.gap.training_gave_way

    def _next_prefill(self, rows_wait: bool) -> PrefillUnit | None:
        """The next chunks of the most urgent prompts, packed while time and tokens allow.

        While rows wait for a decode step, a unit that is predicted to exceed the allowance runs only in a fresh gap,
        or for prompts that are overdue.
        """
        prompts = prefilling(self._rows)
        if not prompts:
            return None
        prompts.sort(key=lambda s: (s.work_class is WorkClass.TRAINING, self._urgency(s)))
        allowance, late = self.gap.prefill_s, []
        if rows_wait:
            allowance -= self.gap.waited_s
            # If training comes next, prompts that are due in the next gap are served in this one.
            within = 2 if self.gap.training_gave_way else 1
            late = overdue(prompts, within, spread=self.gap.is_fresh)
        parts = self._packer.pack(prompts, late, allowance)
        if rows_wait and not late and not self.gap.is_fresh and self._packer.seconds(parts) > allowance:
            return None
        return PrefillUnit(tuple(parts))

    def _next_decode(self, rows: list[SequenceState]) -> DecodeUnit | None:
        """The next decode step. Makes room for a token in every row, oldest first; preempts rows if memory is short."""
        for sequence in rows:
            while sequence.status is SequenceStatus.RUNNING and not self._memory.grow(sequence, sequence.computed + 1):
                self.preempt(to_preempt(self._rows))
                self._memory_is_short = True
        ready = tuple(s for s in rows if s.status is SequenceStatus.RUNNING)
        return DecodeUnit(ready, delayed=self.gap.interrupted) if ready else None

    def _without_rows(self, other: OtherWork) -> Unit | None:
        """The unit to run when no row can use the time."""
        self.gap.idle()
        if other.staging:
            return StagingUnit(0.0)
        return TrainingUnit(self.gap.stall_s) if other.training else None

    # -- records of what ran ---------------------------------------------------------------------

    def record_training(self, seconds: float, now: float) -> None:
        """Records a finished training unit."""
        self._training.add_unit(seconds, now)
        self.share_meter.add_unit(seconds)
        self.gap.add_long_unit(seconds)

    def record_prefill(self, unit: PrefillUnit, seconds: float, now: float) -> None:
        """Records a prefill unit that took `seconds` and ended at `now`."""
        self.cost.observe_prefill([part.chunk for part in unit.parts], seconds, now)
        self.gap.add_long_unit(seconds)
        for part in unit.parts:
            sequence = part.sequence
            sequence.started_at = sequence.started_at or now - seconds
            sequence.served_at = now if part.in_turn else sequence.served_at
            sequence.steps_waited = 0
            advance(sequence, part.tokens)
        if not decoding(self._rows, self.schedule.row_shares):
            self.gap.take_turns()

    def record_launch(self, unit: DecodeUnit, now: float) -> None:
        """Records a decode step at its launch: one more drawn and one more computed token in each row."""
        seconds = self.gap.close(now)
        if seconds is not None:
            self.cost.observe_step(self._last_step, seconds, now)
        self._last_step = [Chunk(1, sequence.computed) for sequence in unit.sequences]
        for sequence in unit.sequences:
            sequence.started_at = sequence.started_at or now
            sequence.drawn += 1
            sequence.computed += 1
        for prompt in prefilling(self._rows):
            prompt.steps_waited += 1

    # -- what the engine asks --------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of sequences without a row."""
        return len(self._waiting)

    @property
    def live(self) -> tuple[SequenceState, ...]:
        """Sequences with a row, oldest first."""
        return tuple(self._rows)

    def sequences(self) -> list[SequenceState]:
        """All sequences that have not finished."""
        return [*self._rows, *self._waiting]

    def check_integrity(self) -> None:
        """Raises AssertionError if the queue, the rows and the sequences' states disagree."""
        self._waiting.check_integrity()
        check_rows(self._rows)
        assert len(self._rows) <= self.config.max_rows
        assert not set(self._rows) & set(self._waiting)

    def _urgency(self, sequence: SequenceState) -> Urgency:
        """Orders prompts: by priority, then by seconds of prefill left, minus a credit for the time waited.

        Instead of subtracting the time waited, which changes all the time, it adds the time since which the sequence
        waits. The order is the same, because all sequences age at the same rate.
        """
        left = self.cost.seconds([Chunk(sequence.to_prefill, sequence.computed)])
        return (sequence.priority, left + _WAIT_CREDIT * sequence.served_at)
