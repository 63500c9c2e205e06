"""The live rows: which of them are prefilled, which take part in a decode step, and which one makes way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mlx_parallm.core import WorkClass
from mlx_parallm.scheduler.sequence import Sequence, Status


class LiveRows:
    """Sequences that hold a row, in order of admission: the last is the youngest."""

    def __init__(self) -> None:
        self._rows: list[Sequence] = []
        self._classes: Counter[WorkClass] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._rows)

    def add(self, sequence: Sequence) -> None:
        self._rows.append(sequence)
        self._classes[sequence.work_class] += 1

    def remove(self, sequence: Sequence) -> None:
        self._rows.remove(sequence)
        self._classes[sequence.work_class] -= 1

    def count(self, work_class: WorkClass) -> int:
        """Rows of one class."""
        return self._classes[work_class]

    def prefilling(self) -> list[Sequence]:
        """Prompts that are not computed yet."""
        return [row for row in self._rows if row.status is Status.PREFILLING]

    def drawing(self, shares: Mapping[WorkClass, float]) -> list[Sequence]:
        """The rows of the next decode step. Each row more makes a step longer, so beside live requests rollouts draw
        by their share only, one at least, the oldest first; the others keep their rows and wait."""
        rows = [row for row in self._rows if row.status is Status.RUNNING and row.wants_draw]
        live = sum(row.work_class is WorkClass.INFERENCE for row in rows)
        if live == 0 or live == len(rows) or shares[WorkClass.INFERENCE] == 0:
            return rows
        places = max(1, int(live * shares[WorkClass.TRAINING] / shares[WorkClass.INFERENCE]))
        rollouts = [row for row in rows if row.work_class is WorkClass.TRAINING]
        waiting = set(rollouts[places:])
        return [row for row in rows if row not in waiting]

    def victim(self) -> Sequence:
        """The row whose memory others get: the youngest rollout, or else the youngest of all."""
        rollouts = [row for row in self._rows if row.work_class is WorkClass.TRAINING]
        return (rollouts or self._rows)[-1]

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree."""
        assert +self._classes == Counter(row.work_class for row in self._rows)
        for row in self._rows:
            assert row.status in (Status.PREFILLING, Status.RUNNING), row.status
            assert (row.status is Status.PREFILLING) == (row.to_prefill > 0)
            assert 0 <= row.computed <= row.length
            assert row.unread >= 0
