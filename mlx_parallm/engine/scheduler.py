"""RLAwareScheduler chooses the next unit of device work. It decides in tokens, rows and seconds, without arrays.

    waiting ──admit──▶ prefilling ──last chunk──▶ running ──▶ finished
       ▲                   │                         │
       └── preempted (youngest first, computed again) ◀──┘

A forward unit computes a token of every row that can sample one, and chunks of prompts. The chunks make it longer by
about `DecodeGap.chunk_s` seconds at most; the prompt with the least left goes first, and waiting counts in its favour.
Prompts whose hidden states are pooled get a smaller share of the time beside decode rows (`DecodeGap.pooling_s`).
Between two forward units, staging, which copies adapters into the bank, gets a share of the time, and a training unit
runs when its share of time is due. Both use all the time that no row can use. Rollouts yield to live requests: they get
their share of a unit's decode rows, or one row while training waits, their prompts come last, and their rows are
preempted first. Within a class and a priority, API keys get rows in turns, by their tokens (`TokenShares`). A key that
holds none gets its first row at once, and one that holds far less than another gets rows from it.

Invariants:
- Units cannot be interrupted. Therefore all that delays the rows of a step, which is the work before it and the chunks
  in it, is sized by prediction to the stall budget. Only the smallest piece of such work may be longer.
- No prompt with a row passes 8 steps without a chunk, whatever is predicted and whatever else waits.
- A sequence without a row waits for rows, for memory, or for other prompts to be computed, never because of a
  prediction. Predictions only order the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.budget import ROW_TOKENS, CostModel, DecodeGap, TokenShares, TrainingSpacer
from mlx_parallm.engine.sequence import Sequence, SequenceStatus
from mlx_parallm.engine.speculate import choose_drafts
from mlx_parallm.engine.units import (
    EVEN,
    LATE,
    MOST_IN_PREFILL,
    MOST_POOLED,
    MOST_POOLED_BESIDE_ROWS,
    ChunkPacker,
    ForwardUnit,
    StagingUnit,
    TrainingUnit,
    Unit,
    UnitSpan,
    overdue,
)
from mlx_parallm.engine.waiting import Lane, PromptKind, Urgency, WaitingQueue, prompt_kind

if TYPE_CHECKING:
    from mlx_parallm.engine.memory import PoolMemory


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler. `max_rows`: rows of the batch. `max_batched_tokens`: prompt tokens of one unit."""

    max_rows: int = 128
    max_batched_tokens: int = 2048
    schedule: DeviceSchedule = field(default_factory=DeviceSchedule)


class RLAwareScheduler:
    """Owns the waiting queue and the live rows. Device thread only.

    Attributes:
        gap: the time since the last forward unit, and the budget of what delays the next one.
        training: when training units are due, and the share of time that they got.
        holds_rollouts: no further rollout gets a row. Those that have one continue.

    Args:
        memory: where rows come from.
        cost: predicts the seconds of forward units. The scheduler corrects it by observed times.
    """

    def __init__(self, config: SchedulerConfig, memory: PoolMemory, cost: CostModel) -> None:
        self.config = config
        self.cost = cost
        self.schedule = config.schedule
        self.gap = DecodeGap(config.schedule.max_decode_stall_s)
        self.training = TrainingSpacer(config.schedule.training_time_share)
        self.preemptions = 0
        self.paused = False
        self.holds_rollouts = False
        self._memory = memory
        self._shares = TokenShares()
        self._waiting = WaitingQueue(cost, memory, self._shares)
        self._rows: list[Sequence] = []  # in order of admission: the last one is the youngest
        self._frozen = False
        self._memory_is_short = False  # True from a preemption for memory until a sequence ends

    def reschedule(self, schedule: DeviceSchedule) -> None:
        """Applies a new schedule from the next unit on."""
        self.schedule = schedule
        self.gap.stall_s, self.training.share = schedule.max_decode_stall_s, schedule.training_time_share

    def pause(self, freeze: bool) -> None:
        """Holds back sequences that are added until `resume`. With `freeze`, the others get no rows and no units."""
        self.paused, self._frozen = True, freeze

    def resume(self) -> None:
        self.paused = self._frozen = False
        self._waiting.release()

    # -- sequences -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence, held=self.paused)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in any state and frees its row at once."""
        self._memory_is_short = False
        before, sequence.status = sequence.status, SequenceStatus.FINISHED
        sequence.group.members.remove(sequence)
        if before is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        else:
            self._free_row(sequence)
        if not self._rows and not len(self._waiting):
            self._shares.reset()

    def preempt(self, sequence: Sequence) -> None:
        """Takes a live sequence's row away. It waits again, keeps its age, and is computed from its start."""
        sequence.status, sequence.drafted = SequenceStatus.WAITING, 0
        self._waiting.add(sequence)
        self.preemptions += 1
        self._free_row(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        self._rows.remove(sequence)
        self._shares.release(sequence)
        self._memory.close(sequence)

    def admit(self) -> None:
        """Gives rows to waiting sequences, best first, until rows or memory run out. Then keys that hold many rows give
        way to those that hold few.

        After a preemption nothing is admitted until a sequence ends. Otherwise the memory taken from a row would be
        given back to the same sequence, and its prompt would be computed again and again. Work classes that already
        hold their share of rows come last. A prompt waits while `MOST_IN_PREFILL` of its kind are in prefill, or, if it
        is pooled, `MOST_POOLED` of these.
        """
        shares, most = self.schedule.row_shares, self.config.max_rows
        if self._frozen or (self._memory_is_short and self._rows):
            return
        lanes = [lane for lane in self._waiting.lanes() if self._memory.ready(lane.adapter)]
        if self.holds_rollouts:
            lanes = [lane for lane in lanes if lane.work_class is not WorkClass.TRAINING]
        if not lanes:
            return
        in_prefill = Counter(map(prompt_kind, prefilling(self._rows)))
        pooled = sum(row.pooling is not None for row in self._rows)
        most_pooled = MOST_POOLED_BESIDE_ROWS if decoding(self._rows, shares) else MOST_POOLED
        while True:
            over_share = [each for each in WorkClass if self._shares.rows[each,] >= shares[each] * most]
            lanes = [lane for lane in lanes if in_prefill[lane.kind] < self._most_in_prefill(lane)]
            lanes = [lane for lane in lanes if not lane.pools or pooled < most_pooled]
            best = self._waiting.best(lanes, over_share)
            if best is None or not self._open_at_once(best):
                return
            in_prefill[prompt_kind(best)] += best.status is SequenceStatus.PREFILLING
            pooled += best.pooling is not None

    def _most_in_prefill(self, lane: Lane) -> float:
        """How many prompts of its kind may be in prefill when one of this lane begins. They are more for the first row
        of a key, so that the prompts of others do not keep it waiting."""
        first = not self._shares.rows[lane.work_class, lane.key] and lane.kind is not PromptKind.SCORED
        return MOST_IN_PREFILL[lane.kind] * (2 if first else 1)

    def _open_at_once(self, sequence: Sequence) -> bool:
        """Gives a row to a waiting sequence. If there is none left, another key may have to give way. Returns False if
        it gets none."""
        while not self._open(sequence):
            row = self._shares.row_to_yield(self._rows, sequence, len(self._rows) >= self.config.max_rows)
            if row is None:
                return False
            row.keeps_row_until = row.sampled + ROW_TOKENS
            self.preempt(row)
        return True

    def _open(self, sequence: Sequence) -> bool:
        """Gives a row to a waiting sequence. Returns False if all rows are held, or memory runs out."""
        if len(self._rows) >= self.config.max_rows or not self._memory.open(sequence):
            return False
        try:
            sequence.steps_waited = 0
            sequence.advance(0)
            self._waiting.remove(sequence)
        except Exception:
            sequence.status = SequenceStatus.WAITING
            self._memory.close(sequence)  # recovery takes back the rows of live sequences only
            raise
        self._rows.append(sequence)
        self._shares.hold(sequence)
        return True

    # -- the next unit ---------------------------------------------------------------------------

    def next_unit(
        self,
        now: float,
        *,
        staging: bool = False,
        urgent: bool = False,
        training: bool = False,
        others_run: bool = False,
    ) -> Unit | None:
        """Chooses the next unit of device work. Call `admit` before.

        Args:
            now: `time.monotonic()`.
            staging: adapters wait to be copied into the bank. If that is `urgent`, it may use the whole stall budget.
            training: an update waits.
            others_run: rows of another base model use the device too, so training takes its share of time only.

        Returns:
            None when there is nothing to do but wait.
        """
        due = self.training.is_due(now, training, others_run or (bool(self._rows) and not self._frozen))
        unit: Unit | None = None
        if not self._frozen:
            prompts = prefilling(self._rows)
            followers = self._share_prefixes(prompts) if prompts else set()
            rows = decoding(self._rows, self.schedule.row_shares, training)
            prompts = prefilling(prompts)  # without those that others have computed
            unit = self._unit_before_rows(rows, prompts, staging, urgent, due)
            unit = unit or self._next_forward(rows, prompts, followers)
        return unit or self._unit_while_idle(staging, training and (due or not others_run))

    def _unit_before_rows(
        self, rows: list[Sequence], prompts: list[Sequence], staging: bool, urgent: bool, training: bool
    ) -> StagingUnit | TrainingUnit | None:
        """The unit that runs before the next forward unit, which would decode these rows, or None."""
        if staging and (not self._rows or self.gap.may_stage(urgent, bool(rows))):
            return StagingUnit(self.gap.staging_left(urgent))
        if training and self._training_fits(bool(rows), prompts):
            return TrainingUnit(self.gap.remaining_s if rows else self.gap.stall_s)
        return None

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

    def _unit_while_idle(self, staging: bool, training: bool) -> StagingUnit | TrainingUnit | None:
        """The unit to run when no request of this base model can use the time, or None."""
        self.gap.idle()
        if staging:
            return StagingUnit(0.0)
        return TrainingUnit(self.gap.stall_s) if training else None

    def _share_prefixes(self, prompts: list[Sequence]) -> set[Sequence]:
        """Gives prompts in prefill what others have computed of them.

        Returns:
            Prompts that would compute the same tokens as another one, which is further on. They wait for its blocks,
            unless they are overdue.
        """
        first: dict[Hashable, Sequence] = {}
        followers: set[Sequence] = set()
        for prompt in sorted(prompts, key=lambda prompt: -prompt.computed):
            key = self._memory.share(prompt)
            prompt.advance(0)
            if key is not None and first.setdefault(key, prompt) is not prompt:
                followers.add(prompt)
        return followers

    @property
    def decode_rows(self) -> list[Sequence]:
        """The decode rows of the next forward unit, as far as they are known now."""
        return [] if self._frozen else decoding(self._rows, self.schedule.row_shares)

    def _next_forward(
        self, rows: list[Sequence], prompts: list[Sequence], followers: set[Sequence]
    ) -> ForwardUnit | None:
        """The next forward unit: a token of each of these rows, and chunks of prompts."""
        if any(row.proposed for row in rows):
            choose_drafts(rows, self.cost)
        rows = self._with_room(rows)
        prompts = prefilling(prompts)  # without those that gave way
        chunks = self._next_chunks(prompts, bool(rows), followers) if prompts else []
        if not rows and not chunks:
            return None
        spans = [UnitSpan(row, row.computed - row.to_redo, row.to_redo + 1 + row.drafted) for row in rows]
        last_chunks = (chunk.row for chunk in chunks if chunk.tokens == chunk.row.pending)
        drafts = sum(row.drafted for row in rows)
        growth = self.cost.growth(len(rows), sum(span.tokens for span in spans))
        return ForwardUnit((*spans, *chunks), (*rows, *last_chunks), len(rows), self.gap.interrupted, drafts, growth)

    def _with_room(self, rows: list[Sequence]) -> list[Sequence]:
        """Makes room for a token in every row, and for its draft if there is memory, oldest first. Preempts rows if
        memory is short; returns the others."""
        for row in rows:
            if row.drafted and not self._memory.extend_by_draft(row):
                row.drafted = 0
            while row.status is SequenceStatus.RUNNING and not self._memory.extend(row, row.length):
                self.preempt(self._memory.to_preempt(self._rows, row))
                self._memory_is_short = True
        return [row for row in rows if row.status is SequenceStatus.RUNNING]

    def _next_chunks(self, prompts: list[Sequence], rows_wait: bool, followers: set[Sequence]) -> list[UnitSpan]:
        """The next chunks of the most urgent prompts that are not `followers`, packed while time and tokens allow.

        Beside decode rows, a chunk that is predicted to exceed the allowance is taken only in a fresh gap, or for
        prompts that are overdue.
        """
        prompts.sort(key=self._order_in_prefill)
        ready = [prompt for prompt in prompts if prompt not in followers]
        most = self.config.max_batched_tokens
        if not rows_wait:
            packer = ChunkPacker(self.cost, most, self.gap.chunk_s - self.cost.seconds())
            return packer.pack(ready, [], at_least_one=True)
        fresh = self.gap.is_fresh
        # If training comes next, prompts that would be overdue in the next step are served in this one.
        late = overdue(prompts, EVEN if fresh else LATE, steps=2 if self.gap.training_gave_way else 1)
        packer = ChunkPacker(self.cost, most, self.gap.chunk_s - self.gap.waited_s, self.gap.pooling_s)
        return packer.pack(ready, late, at_least_one=fresh)

    def _order_in_prefill(self, prompt: Sequence) -> tuple[bool, int, int, Urgency]:
        """The place of a prompt among those in prefill: rollouts come last. Then it is its priority that counts, then
        what its key has got, then its urgency."""
        got = self._shares.tokens((prompt.work_class, prompt.key))
        rollout = prompt.work_class is WorkClass.TRAINING
        return rollout, prompt.priority, got, self._waiting.urgency(prompt, prompt.computed)

    # -- records of what ran ---------------------------------------------------------------------

    def record_launch(self, unit: ForwardUnit, now: float) -> None:
        """Records a forward unit at its launch: its tokens count as computed, and those that it samples as sampled.

        The next unit may be chosen and launched before this one is done. If it fails, preempt all rows: they are
        computed again from their start.
        """
        self.gap.close()
        for sequence in unit.sampling:
            sequence.sampled += 1 + sequence.drafted
        for row in unit.rows:
            row.row.ahead -= unit.growth - 1.0
        for span in unit.spans:
            span.row.started_at = span.row.started_at or now
            self._shares.charge(span.row, span.tokens)
            span.row.advance(span.stop - span.row.computed)
            span.row.to_redo = 0
        if unit.decodes:
            for prompt in prefilling(self._rows):
                prompt.steps_waited += 1
        for chunk in unit.chunks:
            chunk.row.steps_waited = 0
            chunk.row.served_at = now if chunk.in_turn else chunk.row.served_at

    def record_done(self, unit: ForwardUnit, seconds: float, now: float) -> float:
        """Records that a launched unit ended at `now`, when its tokens were read.

        Args:
            seconds: how long the device took: since the launch of the unit, or since the end of the unit before it if
                that was later.

        Returns:
            How many of these seconds its chunks of prompts took, as the cost model predicts it.
        """
        work, prefill_s = [span.work for span in unit.spans], 0.0 if unit.decodes else seconds
        if unit.decodes and unit.chunks:
            chunks_s = sum(self.cost.chunk_seconds(chunk.work) for chunk in unit.chunks)
            prefill_s = seconds * min(chunks_s / self.cost.seconds(work, unit.tokens_sampled), 1.0)
        if unit.growth > 1.0 and not unit.chunks:
            rows = [span._replace(tokens=1) for span in work]
            self.cost.observe(rows, unit.decodes, seconds, now, unit.growth)
        else:
            self.cost.observe(work, unit.tokens_sampled, seconds, now)
        if unit.decodes:
            pooled = (self.cost.chunk_seconds(span.work) for span in unit.chunks if span.row.pooling is not None)
            self.gap.add_step(seconds, now, sum(pooled))
        else:
            self.gap.no_row_waited()
        return prefill_s

    def record_training(self, seconds: float, now: float) -> None:
        """Records a training unit that took `seconds` and ended at `now`."""
        self.training.add_unit(seconds, now)
        self.gap.add_training(seconds)

    # -- what the engine asks --------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of sequences without a row."""
        return len(self._waiting)

    @property
    def live(self) -> tuple[Sequence, ...]:
        """Sequences with a row, oldest first."""
        return tuple(self._rows)

    def sequences(self) -> list[Sequence]:
        """All sequences that have not finished."""
        return [*self._rows, *self._waiting]

    def check_integrity(self) -> None:
        """Raises AssertionError if the queue, the rows and the sequences' states disagree."""
        self._waiting.check_integrity()
        for row in self._rows:
            assert row.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING), row.status
            assert (row.status is SequenceStatus.PREFILLING) == (row.pending > 1)
            assert 0 <= row.computed < row.length
            assert row.unread >= 0
        self._shares.check_integrity(self._rows)
        assert len(self._rows) <= self.config.max_rows
        assert not set(self._rows) & set(self._waiting)


# ---- sequences that hold a row, in order of admission ------------------------------------------


def prefilling(rows: Iterable[Sequence]) -> list[Sequence]:
    """The rows with more than one token to compute: prompts, and preempted sequences that are computed again."""
    return [row for row in rows if row.status is SequenceStatus.PREFILLING]


def decoding(
    rows: Iterable[Sequence], shares: Mapping[WorkClass, float], training_waits: bool = False
) -> list[Sequence]:
    """The decode rows of the next forward unit.

    Each additional row makes a unit longer. Therefore rollouts beside live requests get only their share of the rows,
    at least one, and the oldest rollouts first; and of the rows that report many candidates, only the oldest samples.
    The others keep their rows and wait. If training wants the device too, rollouts get one row: live requests give way
    to one of the two at a time.
    """
    rows = [row for row in rows if row.status is SequenceStatus.RUNNING and row.sampled < row.max_tokens]
    later = [row for row in rows if row.samples_alone][1:]
    rows = [row for row in rows if row not in later] if later else rows
    live = sum(row.work_class is WorkClass.INFERENCE for row in rows)
    if live == 0 or live == len(rows) or shares[WorkClass.INFERENCE] == 0:
        return rows
    share = 0 if training_waits else int(live * shares[WorkClass.TRAINING] / shares[WorkClass.INFERENCE])
    rollouts = [row for row in rows if row.work_class is WorkClass.TRAINING]
    waiting = set(rollouts[max(1, share) :])
    return [row for row in rows if row not in waiting]


def gives_way(rows: Seq[Sequence]) -> Sequence:
    """The row that is preempted if memory is short: the youngest rollout, or the youngest row if there is none. `rows`:
    all live rows, in order of admission."""
    rollouts = [row for row in rows if row.work_class is WorkClass.TRAINING]
    return (rollouts or rows)[-1]
