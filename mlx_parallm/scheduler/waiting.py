"""The waiting queue: sequences without a row, kept in the order in which they will be admitted.

A lane holds the prompt groups of one work class and one adapter, most urgent first. A group is ranked once, by
insertion, when it enters its lane. Waiting makes all ranks better at the same rate, so their order does not change
with time. Whether a class is over its share of rows, and whether an adapter is in the bank, is checked per lane and not
per sequence.

A group without a place in a lane is blocked: it is new, or its first sequence is being prefilled, or draws of a
preempted sequence have not been read back. Blocked groups are checked on every pass of admission. Except for the new
ones, each of them holds or held a row a moment ago, so their number does not grow with the queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import count
from typing import NamedTuple

from mlx_parallm.core import AdapterRef, PromptGroup, SequenceState, SequenceStatus, WorkClass

Urgency = tuple[int, float]
"""Priority, then seconds of prefill that are left, minus a credit for waiting. The smallest is admitted first."""


class Lane(NamedTuple):
    """What all sequences of one lane have in common."""

    work_class: WorkClass
    adapter: AdapterRef


class _Entry(NamedTuple):
    """A group's place in its lane. `order` is unique, so a comparison never reaches `group`."""

    urgency: Urgency
    order: int
    group: PromptGroup


class WaitingQueue:
    """Sequences without a row. Adding, removing and finding the next one take logarithmic time.

    Args:
        urgency: ranks a sequence; called once each time that a group enters a lane.
    """

    def __init__(self, urgency: Callable[[SequenceState], Urgency]) -> None:
        self._urgency = urgency
        self._order = count()
        self._waiting: Counter[PromptGroup] = Counter()  # sequences that wait
        self._lanes: dict[Lane, list[_Entry]] = {}
        self._places: dict[PromptGroup, tuple[Lane, _Entry]] = {}
        self._blocked: dict[PromptGroup, None] = {}
        self._held: dict[SequenceState, None] = {}  # added while paused
        self.paused = False

    def __len__(self) -> int:
        return self._waiting.total() + len(self._held)

    def __iter__(self) -> Iterator[SequenceState]:
        yield from (s for group in self._waiting for s in group.members if s.status is SequenceStatus.WAITING)
        yield from self._held

    def pause(self) -> None:
        """Holds back sequences that are added from now on."""
        self.paused = True

    def resume(self) -> None:
        """Queues the sequences that were held back."""
        self.paused, held, self._held = False, self._held, {}
        for sequence in held:
            self.put_back(sequence)

    def add(self, sequence: SequenceState) -> None:
        """Queues a new sequence, or holds it back during a pause."""
        if self.paused:
            self._held[sequence] = None
        else:
            self.put_back(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """Queues a sequence whose status is WAITING, even during a pause."""
        self._waiting[sequence.group] += 1
        if sequence.group not in self._places:
            self._blocked[sequence.group] = None  # until the next pass of admission

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence. Its status may have changed already."""
        if sequence in self._held:
            del self._held[sequence]
            return
        group = sequence.group
        self._waiting[group] -= 1
        if self._waiting[group] == 0:
            del self._waiting[group]
            self._blocked.pop(group, None)
            self._leave_lane(group)

    def lanes(self) -> list[Lane]:
        """Begins a pass of admission: moves groups that are no longer blocked into lanes, and returns all lanes."""
        for group in list(self._blocked):
            if first := _first(group):
                lane = Lane(first.work_class, first.adapter)
                entry = _Entry(self._urgency(first), next(self._order), group)
                insort(self._lanes.setdefault(lane, []), entry)
                self._places[group] = (lane, entry)
                del self._blocked[group]
        return list(self._lanes)

    def best(self, lanes: Iterable[Lane], over_share: Container[WorkClass]) -> SequenceState | None:
        """The next sequence to admit from these lanes, or None.

        Classes that are not `over_share` come first, then the most urgent sequence.
        """
        heads = [(lane.work_class in over_share, head, lane) for lane in lanes if (head := self._head(lane))]
        if not heads:
            return None
        return _first(min(heads)[1].group)

    def _head(self, lane: Lane) -> _Entry | None:
        """The first entry of a lane whose group has a sequence that can be admitted. Earlier entries become blocked."""
        while entries := self._lanes.get(lane):
            if _first(entries[0].group):
                return entries[0]
            self._blocked[entries[0].group] = None
            self._leave_lane(entries[0].group)
        return None

    def _leave_lane(self, group: PromptGroup) -> None:
        if group not in self._places:
            return
        lane, entry = self._places.pop(group)
        entries = self._lanes[lane]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._lanes[lane]

    def check_integrity(self) -> None:
        """Raises AssertionError if a waiting group has no place, or more than one."""
        assert self.paused or not self._held
        assert all(s.status is SequenceStatus.WAITING and s.group not in self._waiting for s in self._held)
        assert set(self._waiting) == {*self._places, *self._blocked}
        assert not set(self._places) & set(self._blocked)
        for group, waiting in self._waiting.items():
            assert waiting == sum(s.status is SequenceStatus.WAITING for s in group.members)
        assert sum(map(len, self._lanes.values())) == len(self._places)
        assert all(entries == sorted(entries) for entries in self._lanes.values())


def _first(group: PromptGroup) -> SequenceState | None:
    """The group's next sequence to admit, or None.

    A group's prompt is prefilled once, so the others wait for the first sequence's row. A preempted sequence waits
    until its launched draws are read back, because they belong to its tokens.
    """
    leader = group.members[0]
    prompt_pending = leader.status in (SequenceStatus.WAITING, SequenceStatus.PREFILLING) and not leader.drawn
    members = [leader] if prompt_pending else group.members
    return next((s for s in members if s.status is SequenceStatus.WAITING and s.unread == 0), None)
