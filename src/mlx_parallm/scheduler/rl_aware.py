"""RLAwareScheduler: which unit of device work is next. Decides in tokens, rows and seconds; touches no tensor.

    waiting ──admit──▶ prefilling ──last chunk──▶ running ──▶ finished
       ▲                   │                         │
       └──── preempted (youngest first, recomputed later) ◀┘

The rule, in one breath: decode whenever it is due, and between two decode steps spend at most
`stall_seconds` on prefill, the prompt with the least left first (age counts in its favour). Staging takes a part of
each gap between two steps; a micro-step of training stands in one where its share of time is due. Both take all the
time that no row can use. Rollouts yield: beside live requests their share of a step's rows is all they get, their
prompts come last, and their rows make way first.
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
from mlx_parallm.scheduler.rows import drawing, victim
from mlx_parallm.scheduler.sequence import Sequence, Status
from mlx_parallm.scheduler.share import TimeShare
from mlx_parallm.scheduler.units import DecodeUnit, PrefillUnit, StagingUnit, TrainingUnit, Unit

_PREFILL_STALL_S = 0.3
"""Of prefill between two decode steps, at most, however long rows may wait."""

_AGEING = 10.0
"""Seconds of remaining prefill that one second of waiting makes up for. Being served starts the
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
        cost: predicts prefill seconds; updated by `prefilled`.
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
        self.paused = False
        self._frozen = False
        self._waiting: list[Sequence] = []
        self._held: list[Sequence] = []  # came while paused
        self._live: list[Sequence] = []  # in order of admission: the last is the youngest
        self._gap = Gap()
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

    def pause(self, freeze: bool) -> None:
        """What is added from now on waits for `resume`. `freeze`: what is here gets no row and no unit either."""
        self.paused, self._frozen = True, freeze

    def resume(self) -> None:
        self.paused = self._frozen = False
        self._waiting += self._held
        self._held = []

    # -- the queue -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        (self._held if self.paused else self._waiting).append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, whatever its state; its row is free at once."""
        self._memory_is_short = False
        self._drop_row(sequence)
        if sequence.status is Status.WAITING:
            (self._held if sequence in self._held else self._waiting).remove(sequence)
        sequence.status = Status.FINISHED
        sequence.group.members.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a live sequence's row away; it waits and recomputes, keeping its age."""
        self._drop_row(sequence)
        sequence.computed = 0
        sequence.status = Status.WAITING
        self._waiting.append(sequence)
        self.preemptions += 1

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._held)

    @property
    def live(self) -> tuple[Sequence, ...]:
        return tuple(self._live)

    def sequences(self) -> Iterable[Sequence]:
        return [*self._live, *self._waiting, *self._held]

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
        if training_is_due and (not due or (self._gap.clean and self._has_room)):
            # where rows decode, right after a step: no gap holds prefill before it, or two
            return TrainingUnit(self._stall_left if due else self.schedule.max_decode_stall_s)
        prefill = self._next_prefill(now, protect=bool(due))
        if prefill is not None:
            return prefill
        rows = self._make_room(due)
        if rows:
            return DecodeUnit(rows, awaited=self._gap.interrupted)
        return self._beside_rows(staging_waits, training_waits)

    def _beside_rows(self, staging_waits: bool, training_waits: bool) -> Unit | None:
        """What there is to do while no row can use the time."""
        self._gap.idle()
        if staging_waits:
            return StagingUnit(0.0)
        return TrainingUnit(self.schedule.max_decode_stall_s) if training_waits else None

    def spent(self, seconds: float) -> None:
        """Books time that running rows had to wait for beside prefill units: making room for new rows."""
        self._gap.spend(seconds)

    def staged(self, seconds: float) -> None:
        """Books a finished staging unit."""
        self._gap.stage(seconds)

    def trained(self, seconds: float, now: float) -> None:
        """Books a finished micro-step."""
        self._training.ran(seconds, now)
        self.shares.ran(seconds)
        self._gap.work(seconds)

    def prefilled(self, unit: PrefillUnit, seconds: float, now: float) -> None:
        """Books a finished prefill unit that took `seconds`."""
        self.cost.observe([part.chunk for part in unit.parts], seconds)
        self._gap.work(seconds)
        for part in unit.parts:
            part.sequence.served_at = now
            part.sequence.computed += part.tokens
            self._update_status(part.sequence)
        if not self._decodable():
            self._gap.staged = 0.0  # no step closes this gap: staging and prefill take turns in it

    def launched(self, unit: DecodeUnit, now: float) -> None:
        """Books a launched decode step: one more draw and one more computed token per row."""
        if (length := self._gap.close(now)) is not None:
            self.gaps.stepped(length)
        for sequence in unit.sequences:
            sequence.drawn += 1
            sequence.computed += 1

    # -- admission -------------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """Gives rows to waiting sequences, best first, until rows or memory run out.

        After a preemption nothing is admitted until a row ends: what was just taken from one row
        would otherwise be given back to it, and its prompt computed over and over.
        """
        if self._frozen or (self._memory_is_short and self._live):
            return
        while self._waiting and len(self._live) < self.config.max_rows:
            best = min(self._eligible(), key=lambda s: self._rank(s, now), default=None)
            if best is None or not self._give_row(best, now):
                return

    def _eligible(self) -> list[Sequence]:
        free = (s for s in self._waiting if s.unread == 0 and not self._leader_is_busy(s))
        return [s for s in free if self._memory.ready(s)]

    def _give_row(self, sequence: Sequence, now: float) -> bool:
        computed = self._memory.allocate(sequence, self._fork_source(sequence))
        if computed is None:
            return False
        self._waiting.remove(sequence)
        self._live.append(sequence)
        sequence.computed = computed
        sequence.admitted_at = sequence.admitted_at or now
        self._update_status(sequence)
        return True

    def _leader_is_busy(self, sequence: Sequence) -> bool:
        """A group's prompt is prefilled once: its other members wait for the leader's row."""
        leader = sequence.leader()
        return leader is not sequence and leader.status in (Status.WAITING, Status.PREFILLING) and not leader.drawn

    def _fork_source(self, sequence: Sequence) -> Sequence | None:
        running = (s for s in sequence.group.members if s.status is Status.RUNNING)
        return next(running, None)

    def _rank(self, sequence: Sequence, now: float) -> tuple[bool, int, float]:
        """Smaller is sooner: the class below its share, then priority, then least left, less age."""
        return (self._over_share(sequence.work_class), *self._urgency(sequence, now))

    def _urgency(self, sequence: Sequence, now: float) -> tuple[int, float]:
        left = self.cost.seconds([Chunk(sequence.to_prefill, sequence.computed)])
        return (sequence.priority, left - _AGEING * (now - sequence.served_at))

    def _over_share(self, work_class: WorkClass) -> bool:
        """Shares are of rows, and work-conserving: they only decide who is served first."""
        rows = sum(s.work_class is work_class for s in self._live)
        return rows >= self.schedule.row_shares[work_class] * self.config.max_rows

    # -- staging ---------------------------------------------------------------------------------

    def _staging_allowance(self, urgent: bool) -> float:
        """Seconds of it between two decode steps."""
        return self.schedule.max_decode_stall_s if urgent else self._gap.staging_share

    @property
    def _stall_left(self) -> float:
        """Seconds that rows may still wait for their next step."""
        return max(self.schedule.max_decode_stall_s - self._gap.debt, 0.0)

    @property
    def _has_room(self) -> bool:
        """Whether a gap has not been used up by half: what is long waits for the next one."""
        return self._stall_left > 0.5 * self.schedule.max_decode_stall_s

    def _may_stage(self, urgent: bool, rows_wait: bool) -> bool:
        """All the time while no row lives; else a share of each gap: rows that prefill must get on too, or versions
        that wait for each other's slots could be staged in turns for ever."""
        if rows_wait and not self._gap.clean and not self._has_room:
            return False
        return not self._live or self._gap.may_stage(self._staging_allowance(urgent))

    # -- prefill ---------------------------------------------------------------------------------

    def _next_prefill(self, now: float, protect: bool) -> PrefillUnit | None:
        """The most urgent prompts' next chunks, packed while time and tokens allow."""
        pending = [s for s in self._live if s.status is Status.PREFILLING]
        pending.sort(key=lambda s: (s.work_class is WorkClass.TRAINING, self._urgency(s, now)))
        allowance = self.stall_seconds - (self._gap.debt if protect else 0.0)
        parts = self._packing.pack(pending, allowance)
        overdue = protect and self._gap.debt > 0.0 and self._packing.seconds(parts) > allowance
        return PrefillUnit(tuple(parts)) if parts and not overdue else None

    # -- decode ----------------------------------------------------------------------------------

    def _decodable(self) -> list[Sequence]:
        rows = [s for s in self._live if s.status is Status.RUNNING and s.wants_draw]
        return drawing(rows, self.schedule.row_shares)

    def _make_room(self, rows: list[Sequence]) -> tuple[Sequence, ...]:
        """Grows every row by one token, oldest first; rollouts and the youngest make way when memory is spent."""
        for sequence in rows:
            while sequence in self._live and not self._memory.grow(sequence, sequence.computed + 1):
                self.preempt(victim(self._live))
                self._memory_is_short = True
        return tuple(s for s in rows if s.status is Status.RUNNING)

    # -- books -----------------------------------------------------------------------------------

    def _update_status(self, sequence: Sequence) -> None:
        sequence.status = Status.PREFILLING if sequence.to_prefill else Status.RUNNING

    def _drop_row(self, sequence: Sequence) -> None:
        if sequence in self._live:
            self._live.remove(sequence)
            self._memory.free(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree."""
        assert len(self._live) <= self.config.max_rows
        assert not set(self._live) & {*self._waiting, *self._held}
        assert not set(self._waiting) & set(self._held)
        assert self.paused or not self._held
        assert all(s.status is Status.WAITING for s in [*self._waiting, *self._held])
        for s in self._live:
            assert s.status in (Status.PREFILLING, Status.RUNNING), s.status
            assert (s.status is Status.PREFILLING) == (s.to_prefill > 0)
            assert 0 <= s.computed <= s.length
            assert s.unread >= 0
