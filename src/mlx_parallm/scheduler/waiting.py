"""The waiting sequences, in an order that is kept and not computed again on every step.

A lane holds the groups of one work class and one adapter, best first; it is sorted by insertion. A group is ranked
once, when it enters its lane, at the machine's speed of that moment. Waiting makes all ranks better at the same rate,
so their order does not change with time. Whether a class is over its share of rows, or an adapter is on the device,
is asked once for a lane and not for each of its sequences.

Groups without a place in a lane are blocked: they are new, or their leader is being prefilled, or the draws of a
preempted member were not read back. They are looked at on every pass; beside the new ones, each has or had a row a
moment ago, so their number does not grow with the queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import NamedTuple

from mlx_parallm.core import AdapterRef, WorkClass
from mlx_parallm.scheduler.sequence import Group, Sequence, Status

Urgency = tuple[int, float]
"""Priority, then seconds of prefill left less what waiting makes up for. Smaller is sooner."""


class Lane(NamedTuple):
    """What the sequences of one lane have in common."""

    work_class: WorkClass
    adapter: AdapterRef


class _Entry(NamedTuple):
    """A group's place in its lane. `order` is unique, so that comparing never reaches the group."""

    urgency: Urgency
    order: int
    group: Group


class WaitingQueue:
    """Sequences without a row. Adding, removing and finding the best one take time logarithmic in their number.

    Args:
        urgency: ranks a sequence; called once for each time that a group enters a lane.
    """

    def __init__(self, urgency: Callable[[Sequence], Urgency]) -> None:
        self._urgency = urgency
        self._order = count()
        self._waiting: Counter[Group] = Counter()  # members that wait
        self._lanes: dict[Lane, list[_Entry]] = {}
        self._places: dict[Group, tuple[Lane, _Entry]] = {}
        self._blocked: dict[Group, None] = {}
        self._held: dict[Sequence, None] = {}  # added while paused
        self.paused = False

    def __len__(self) -> int:
        return self._waiting.total() + len(self._held)

    def __iter__(self) -> Iterator[Sequence]:
        yield from (s for group in self._waiting for s in group.members if s.status is Status.WAITING)
        yield from self._held

    def pause(self) -> None:
        """Holds back what is added from now on."""
        self.paused = True

    def resume(self) -> None:
        """Queues what was held back."""
        self.paused, held, self._held = False, self._held, {}
        for sequence in held:
            self.put_back(sequence)

    def add(self, sequence: Sequence) -> None:
        """Takes in a new sequence."""
        if self.paused:
            self._held[sequence] = None
        else:
            self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queues a sequence whose status is WAITING, in a pause as well."""
        self._waiting[sequence.group] += 1
        if sequence.group not in self._places:
            self._blocked[sequence.group] = None  # until the next pass

    def remove(self, sequence: Sequence) -> None:
        """Lets go of a sequence, whatever its status is by now."""
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
        """Lanes that hold sequences, after a look at the blocked groups: one pass of admission begins."""
        for group in list(self._blocked):
            if first := _first(group):
                self._enter_lane(group, first)
                del self._blocked[group]
        return list(self._lanes)

    def best(self, lanes: Iterable[Lane], over_share: Callable[[WorkClass], bool]) -> Sequence | None:
        """The sequence of these lanes to be admitted next: of the class below its share, then by urgency."""
        heads = [(over_share(lane.work_class), head, lane) for lane in lanes if (head := self._head(lane))]
        if not heads:
            return None
        return _first(min(heads)[1].group)

    def _head(self, lane: Lane) -> _Entry | None:
        """The best entry of a lane with a member that can be admitted; those before it are set aside."""
        while entries := self._lanes.get(lane):
            if _first(entries[0].group):
                return entries[0]
            self._blocked[entries[0].group] = None
            self._leave_lane(entries[0].group)
        return None

    def _enter_lane(self, group: Group, first: Sequence) -> None:
        lane = Lane(first.work_class, first.adapter)
        entry = _Entry(self._urgency(first), next(self._order), group)
        insort(self._lanes.setdefault(lane, []), entry)
        self._places[group] = (lane, entry)

    def _leave_lane(self, group: Group) -> None:
        if group not in self._places:
            return
        lane, entry = self._places.pop(group)
        entries = self._lanes[lane]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._lanes[lane]

    def check_integrity(self) -> None:
        """Raises AssertionError when a waiting group has no place, or two."""
        assert self.paused or not self._held
        assert all(s.status is Status.WAITING and s.group not in self._waiting for s in self._held)
        assert set(self._waiting) == {*self._places, *self._blocked}
        assert not set(self._places) & set(self._blocked)
        assert all(self._waiting[g] == sum(s.status is Status.WAITING for s in g.members) for g in self._waiting)
        assert sum(map(len, self._lanes.values())) == len(self._places)
        assert all(entries == sorted(entries) for entries in self._lanes.values())


def _first(group: Group) -> Sequence | None:
    """The group's member to be admitted next. A group's prompt is prefilled once: the others wait for the leader's row.
    Draws of a preempted member that are still to be read come first, for they are among its tokens."""
    leader = group.members[0]
    busy = leader.status in (Status.WAITING, Status.PREFILLING) and not leader.drawn
    members = [leader] if busy else group.members
    return next((s for s in members if s.status is Status.WAITING and s.unread == 0), None)
