"""The live rows: which of them are being prefilled, which take part in a decode step, and which is preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mlx_parallm.core import SequenceState, SequenceStatus, WorkClass
from mlx_parallm.scheduler.units import RowMemory


class LiveRows:
    """Sequences that hold a row, in order of admission: the last one is the youngest."""

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory
        self._rows: list[SequenceState] = []
        self._per_class: Counter[WorkClass] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._rows)

    def add(self, sequence: SequenceState) -> bool:
        """Gives a sequence a row: a copy of a running row of its group if there is one. False when memory is spent."""
        source = next((s for s in sequence.group.members if s.status is SequenceStatus.RUNNING), None)
        computed = self._memory.allocate(sequence, source)
        if computed is None:
            return False
        sequence.computed = sequence.steps_waited = 0
        advance(sequence, computed)
        self._rows.append(sequence)
        self._per_class[sequence.work_class] += 1
        return True

    def remove(self, sequence: SequenceState) -> None:
        """Frees a sequence's row."""
        self._rows.remove(sequence)
        self._per_class[sequence.work_class] -= 1
        self._memory.free(sequence)

    def make_room(self, sequence: SequenceState) -> bool:
        """Makes room for the next token in a sequence's row. False when memory is spent."""
        return self._memory.grow(sequence, sequence.computed + 1)

    def count(self, work_class: WorkClass) -> int:
        """The number of rows of one class."""
        return self._per_class[work_class]

    def prefilling(self) -> list[SequenceState]:
        """Sequences whose prompts are not computed yet."""
        return [row for row in self._rows if row.status is SequenceStatus.PREFILLING]

    def decoding(self, shares: Mapping[WorkClass, float]) -> list[SequenceState]:
        """The rows of the next decode step.

        Each additional row makes a step longer. Therefore rollouts beside live requests get only their share of the
        rows, at least one, and the oldest rollouts first. The other rollouts keep their rows and wait.
        """
        rows = [row for row in self._rows if row.status is SequenceStatus.RUNNING and row.may_draw]
        live = sum(row.work_class is WorkClass.INFERENCE for row in rows)
        if live == 0 or live == len(rows) or shares[WorkClass.INFERENCE] == 0:
            return rows
        places = max(1, int(live * shares[WorkClass.TRAINING] / shares[WorkClass.INFERENCE]))
        rollouts = [row for row in rows if row.work_class is WorkClass.TRAINING]
        waiting = set(rollouts[places:])
        return [row for row in rows if row not in waiting]

    def to_preempt(self) -> SequenceState:
        """The row to preempt when memory is short: the youngest rollout, or the youngest row if there is none."""
        rollouts = [row for row in self._rows if row.work_class is WorkClass.TRAINING]
        return (rollouts or self._rows)[-1]

    def check_integrity(self) -> None:
        """Raises AssertionError if a row's counts and its status disagree."""
        assert +self._per_class == Counter(row.work_class for row in self._rows)
        for row in self._rows:
            assert row.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING), row.status
            assert (row.status is SequenceStatus.PREFILLING) == (row.to_prefill > 0)
            assert 0 <= row.computed <= row.length
            assert row.unread >= 0


def advance(sequence: SequenceState, tokens: int) -> None:
    """Counts `tokens` more computed tokens of a sequence that holds a row. It is running when its prompt is done."""
    sequence.computed += tokens
    sequence.status = SequenceStatus.PREFILLING if sequence.to_prefill else SequenceStatus.RUNNING
