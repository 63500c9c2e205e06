"""RLAwareScheduler: which unit of device work is next. Decides in tokens, rows and seconds; touches no tensor.

    waiting ──admit──▶ prefilling ──last chunk──▶ running ──▶ finished
       ▲                   │                         │
       └──── preempted (youngest first, recomputed later) ◀┘

Decode runs whenever a row can draw. Between two decode steps prefill gets about `stall_seconds`, the prompt with the
least left first (waiting counts in its favour). Staging takes a part of each gap between two steps; a unit of training
runs in a gap when its share of time is due. Both take all the time that no row can use. Rollouts yield: beside live
requests they get only their share of a step's rows, their prompts come last, and their rows make way first.

Invariants:
- A unit cannot be interrupted, so a stall is bounded by what is put between two steps: units sized to the budget by
  predictions, or one least chunk where even that is predicted to take longer.
- Every prompt with a row gets a chunk before 8 decode steps have passed since its last one, whatever is predicted and
  whatever else waits (`progress`).
- A sequence without a row waits for rows or memory, never because of a prediction; predictions only order the queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_parallm.core import DeviceSchedule, WorkClass
from mlx_parallm.scheduler.cost import Chunk, CostModel
from mlx_parallm.scheduler.gap import Gap
from mlx_parallm.scheduler.memory import RowMemory
from mlx_parallm.scheduler.meters import GapMeter, ShareMeter
from mlx_parallm.scheduler.packing import Packing
from mlx_parallm.scheduler.progress import overdue
from mlx_parallm.scheduler.rows import LiveRows
from mlx_parallm.scheduler.sequence import Sequence, Status
from mlx_parallm.scheduler.share import TimeShare
from mlx_parallm.scheduler.units import DecodeUnit, PrefillPart, PrefillUnit, StagingUnit, TrainingUnit, Unit
from mlx_parallm.scheduler.waiting import Urgency, WaitingQueue

_PREFILL_STALL_S = 0.3
"""Longest prefill time allowed between two decode steps, in seconds, whatever the budget for all work is."""

_AGEING = 10.0
"""Seconds of remaining prefill that one second of waiting makes up for. Being served in turn starts the
wait again: a long prompt under a stream of short ones gets a chunk now and then, not all the time."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_rows`: of the batch. `max_batched_tokens`: of one unit of prefill."""

    max_rows: int = 128
    max_batched_tokens: int = 2048
    schedule: DeviceSchedule = field(default_factory=DeviceSchedule)


class RLAwareScheduler:
    """Owns the waiting queue and the live rows. Single-threaded: the device thread's.

    Args:
        memory: where rows come from.
        cost: predicts prefill seconds; corrected by `prefilled` and `launched`.
    """

    def __init__(self, config: SchedulerConfig, memory: RowMemory, cost: CostModel) -> None:
        self.config = config
        self.cost = cost
        self.preemptions = 0
        self.schedule = config.schedule
        self.gaps = GapMeter()
        self.shares = ShareMeter()
        self._memory = memory
        self._packing = Packing(cost, config.max_batched_tokens)
        self._frozen = False
        self._waiting = WaitingQueue(self._urgency)
        self._live = LiveRows()
        self._gap = Gap()
        self._stepping: list[Chunk] = []  # the work of the last step launched
        self._training = TimeShare(config.schedule.training_time_share)
        self._memory_is_short = False  # since a preemption, until a row ends

    def reschedule(self, schedule: DeviceSchedule) -> None:
        """Shares the device like this from now on."""
        self.schedule = schedule
        self._training.share = schedule.training_time_share

    @property
    def stall_seconds(self) -> float:
        """Prefill time allowed between two decode steps."""
        return min(_PREFILL_STALL_S, self.schedule.max_decode_stall_s)

    # -- a pause ---------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self._waiting.paused

    def pause(self, freeze: bool) -> None:
        """Holds back what is added until `resume`. `freeze`: what is here gets no row and no unit either."""
        self._waiting.pause()
        self._frozen = freeze

    def resume(self) -> None:
        self._frozen = False
        self._waiting.resume()

    # -- the queue -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, whatever its state; its row is free at once."""
        self._memory_is_short = False
        before, sequence.status = sequence.status, Status.FINISHED
        sequence.group.members.remove(sequence)
        if before is Status.WAITING:
            self._waiting.remove(sequence)
        else:
            self._drop_row(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a live sequence's row away; it waits and recomputes, keeping its age."""
        self._drop_row(sequence)
        sequence.computed = 0
        sequence.status = Status.WAITING
        self._waiting.put_back(sequence)
        self.preemptions += 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def live(self) -> tuple[Sequence, ...]:
        return tuple(self._live)

    def sequences(self) -> Iterable[Sequence]:
        return [*self._live, *self._waiting]

    # -- the next unit ---------------------------------------------------------------------------

    def next_unit(
        self, now: float, staging_waits: bool = False, training_waits: bool = False, urgent: bool = False
    ) -> Unit | None:
        """The next unit of device work, or None when there is nothing to do but wait. Call `admit` before.

        `urgent`: what waits to be staged is to be there at once.
        """
        due = self._decodable()
        self.shares.see(now, contended=training_waits and bool(self._live) and not self._frozen)
        training_is_due = self._training.is_due(now, training_waits)
        if self._frozen:
            return self._beside_rows(staging_waits, training_waits)
        if staging_waits and self._may_stage(urgent, bool(due)):
            return StagingUnit(max(self._staging_allowance(urgent) - self._gap.staged, 0.0))
        if training_is_due and self._training_takes_gap(bool(due)):
            stall = self.schedule.max_decode_stall_s
            return TrainingUnit(self._gap.left(stall) if due else stall)
        prefill = self._next_prefill(protect=bool(due))
        if prefill is not None:
            return prefill
        rows = self._make_room(due)
        if rows:
            return DecodeUnit(rows, awaited=self._gap.interrupted)
        return self._beside_rows(staging_waits, training_waits)

    def _training_takes_gap(self, rows_wait: bool) -> bool:
        """Whether training that is due runs now.

        While rows decode: only in a fresh gap, so that none holds prefill before it, or two units of it. It makes way
        for prompts at their limit, but not in two gaps running. While none can, it takes turns with prefill.
        """
        if not rows_wait:
            return self._gap.clean or not self._live.prefilling()
        if not self._is_fresh:
            return False
        if not self._gap.training_was_put_off and overdue(self._live.prefilling()):
            self._gap.training_put_off = True
        return not self._gap.training_put_off

    def _beside_rows(self, staging_waits: bool, training_waits: bool) -> Unit | None:
        """What there is to do while no row can use the time."""
        self._gap.idle()
        if staging_waits:
            return StagingUnit(0.0)
        return TrainingUnit(self.schedule.max_decode_stall_s) if training_waits else None

    def add_wait_time(self, seconds: float) -> None:
        """Books time that running rows had to wait for beside units: making room for new rows, messages."""
        self._gap.add_wait_time(seconds)

    def staged(self, seconds: float) -> None:
        """Books a finished staging unit."""
        self._gap.add_staging(seconds)

    def trained(self, seconds: float, now: float) -> None:
        """Books a finished unit of training."""
        self._training.ran(seconds, now)
        self.shares.ran(seconds)
        self._gap.add_work(seconds)

    def prefilled(self, unit: PrefillUnit, seconds: float, now: float) -> None:
        """Books a prefill unit that took `seconds` and ended at `now`."""
        self.cost.observe_prefill([part.chunk for part in unit.parts], seconds, now)
        self._gap.add_work(seconds)
        for part in unit.parts:
            self._advance(part, now - seconds, now)
        if not self._decodable():
            self._gap.begin_turns()

    def _advance(self, part: PrefillPart, started_at: float, now: float) -> None:
        sequence = part.sequence
        sequence.started_at = sequence.started_at or started_at
        sequence.steps_waited = 0
        if part.in_turn:
            sequence.served_at = now
        sequence.computed += part.tokens
        self._update_status(sequence)

    def launched(self, unit: DecodeUnit, now: float) -> None:
        """Books a launched decode step: one more draw and one more computed token per row."""
        if (closed := self._gap.close(now)) is not None:
            self.gaps.stepped(closed.seconds)
            if not closed.interrupted:
                self.cost.observe_step(self._stepping, closed.step_seconds, now)
        self._stepping = [Chunk(1, sequence.computed) for sequence in unit.sequences]
        for sequence in unit.sequences:
            sequence.started_at = sequence.started_at or now
            sequence.drawn += 1
            sequence.computed += 1
        for prompt in self._live.prefilling():
            prompt.steps_waited += 1

    # -- admission -------------------------------------------------------------------------------

    def admit(self) -> None:
        """Gives rows to waiting sequences, best first, until rows or memory run out.

        After a preemption nothing is admitted until a row ends: what was just taken from one row
        would otherwise be given back to it, and its prompt computed over and over.
        """
        if self._frozen or self._is_full or (self._memory_is_short and self._live):
            return
        lanes = [lane for lane in self._waiting.lanes() if self._memory.ready(lane.adapter)]
        while not self._is_full:
            best = self._waiting.best(lanes, self._over_share)
            if best is None or not self._give_row(best):
                return

    @property
    def _is_full(self) -> bool:
        return len(self._live) >= self.config.max_rows

    def _give_row(self, sequence: Sequence) -> bool:
        computed = self._memory.allocate(sequence, self._fork_source(sequence))
        if computed is None:
            return False
        sequence.computed = computed
        sequence.steps_waited = 0
        self._update_status(sequence)
        self._waiting.remove(sequence)
        self._live.add(sequence)
        return True

    def _fork_source(self, sequence: Sequence) -> Sequence | None:
        running = (s for s in sequence.group.members if s.status is Status.RUNNING)
        return next(running, None)

    def _urgency(self, sequence: Sequence) -> Urgency:
        """Smaller is sooner: priority, then least left, less what waiting makes up for.

        Sequences age at the same rate, so instead of the waiting time, which would change all the time, the time since
        when a sequence waits is added.
        """
        left = self.cost.seconds([Chunk(sequence.to_prefill, sequence.computed)])
        return (sequence.priority, left + _AGEING * sequence.served_at)

    def _over_share(self, work_class: WorkClass) -> bool:
        """Shares are of rows, and work-conserving: they only decide who is served first."""
        return self._live.count(work_class) >= self.schedule.row_shares[work_class] * self.config.max_rows

    # -- staging ---------------------------------------------------------------------------------

    def _staging_allowance(self, urgent: bool) -> float:
        """Seconds of it between two decode steps."""
        return self.schedule.max_decode_stall_s if urgent else self._gap.staging_share

    @property
    def _is_fresh(self) -> bool:
        """Whether the current gap can take a unit of any length."""
        return self._gap.is_fresh(self.schedule.max_decode_stall_s)

    def _may_stage(self, urgent: bool, rows_wait: bool) -> bool:
        """All the time while no row lives; else a share of each gap: rows that prefill must get on too, or versions
        that wait for each other's slots could be staged in turns for ever."""
        if rows_wait and not self._gap.clean and not self._gap.has_room(self.schedule.max_decode_stall_s):
            return False
        return not self._live or self._gap.may_stage(self._staging_allowance(urgent))

    # -- prefill ---------------------------------------------------------------------------------

    def _next_prefill(self, protect: bool) -> PrefillUnit | None:
        """The most urgent prompts' next chunks, packed while time and tokens allow.

        `protect`: rows wait for a decode step. A unit that is predicted to take longer than the allowance then runs
        only in a fresh gap, or for prompts that must not wait any longer.
        """
        pending = self._live.prefilling()
        if not pending:
            return None
        pending.sort(key=lambda s: (s.work_class is WorkClass.TRAINING, self._urgency(s)))
        allowance = self.stall_seconds - (self._gap.waited if protect else 0.0)
        late = self._overdue(pending) if protect else []
        parts = self._packing.pack(pending, late, allowance)
        if protect and not late and not self._is_fresh and self._packing.seconds(parts) > allowance:
            return None
        return PrefillUnit(tuple(parts))

    def _overdue(self, pending: list[Sequence]) -> list[Sequence]:
        """Prompts to be served in this gap whatever it takes; where training comes next, those of the next gap too."""
        return overdue(pending, within=2 if self._gap.training_put_off else 1, spread=self._is_fresh)

    # -- decode ----------------------------------------------------------------------------------

    def _decodable(self) -> list[Sequence]:
        return self._live.drawing(self.schedule.row_shares)

    def _make_room(self, rows: list[Sequence]) -> tuple[Sequence, ...]:
        """Grows every row by one token, oldest first; rollouts and the youngest make way when memory is spent."""
        for sequence in rows:
            while sequence.status is Status.RUNNING and not self._memory.grow(sequence, sequence.computed + 1):
                self.preempt(self._live.victim())
                self._memory_is_short = True
        return tuple(s for s in rows if s.status is Status.RUNNING)

    # -- books -----------------------------------------------------------------------------------

    def _update_status(self, sequence: Sequence) -> None:
        sequence.status = Status.PREFILLING if sequence.to_prefill else Status.RUNNING

    def _drop_row(self, sequence: Sequence) -> None:
        self._live.remove(sequence)
        self._memory.free(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree."""
        self._waiting.check_integrity()
        self._live.check_integrity()
        assert len(self._live) <= self.config.max_rows
        assert not set(self._live) & set(self._waiting)
