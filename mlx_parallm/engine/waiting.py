"""The sequences that wait for a row, in the order of admission.

A lane of the waiting queue holds the prompt groups of one work class, one API key, one adapter and one kind of prompt,
and either those that are pooled or the others, most urgent first. A group is ranked once, by insertion, when it enters
its lane.
Waiting makes all ranks better at the same rate, so their order does not change with time. Whether a class is over its
share of rows, whether an adapter is in the bank, and whether another prompt of a kind may be prefilled, is checked per
lane and not per sequence.

A group without a place in a lane is blocked: it is new, or it awaits a prefix from the disk, or its first sequence is
being prefilled, or the sampled tokens of a preempted sequence have not been read back. Blocked groups are checked on
every pass of admission. Except for the first two kinds, each of them holds a row or held one a moment ago, so their
number does not grow with the queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.budget import Chunk, CostModel, Owner, TokenShares
from mlx_parallm.engine.sequence import PromptGroup, Sequence, SequenceStatus

if TYPE_CHECKING:
    from mlx_parallm.engine.memory import PoolMemory

# ---- kinds of prompts --------------------------------------------------------------------------

SHORT_PROMPT = 64
"""A prompt with at most so many tokens left to compute is short."""


class PromptKind(Enum):
    """What a prompt demands of the units that compute it.

    Chunks of SHORT prompts share one attention call, and each chunk of a LONG prompt needs a call of its own. A SCORED
    prompt, whose logprobs are wanted, or those of many candidates for the token that follows it, is the only prompt in
    its units.
    """

    SHORT = "short"
    LONG = "long"
    SCORED = "scored"


def prompt_kind(sequence: Sequence, cached: int = 0) -> PromptKind:
    """The kind of a prompt. `cached`: tokens of a waiting sequence that its row will start with."""
    if sequence.scored or sequence.samples_alone:
        return PromptKind.SCORED
    return PromptKind.LONG if sequence.to_compute - cached > SHORT_PROMPT else PromptKind.SHORT


# ---- waiting for a row -------------------------------------------------------------------------

Urgency = tuple[int, float]
"""Priority, then seconds of prefill that are left, minus a credit for waiting. The smallest is admitted first."""


class Lane(NamedTuple):
    """What all sequences of one lane have in common. `pools`: they have a `pooling`."""

    work_class: WorkClass
    key: str
    adapter: AdapterRef
    kind: PromptKind
    pools: bool = False

    @property
    def owner(self) -> Owner:
        """Whose rows its sequences get, as `TokenShares` counts them."""
        return self.work_class, self.key, self.adapter.name


_WAIT_CREDIT = 10.0
"""Seconds of remaining prefill that one second of waiting outweighs. A chunk served in turn restarts the wait, so a
long prompt beside a stream of short ones gets a chunk now and then, and not all the time."""


class _Entry(NamedTuple):
    """A group's place in its lane. `order` is unique, so a comparison never reaches `group`."""

    urgency: Urgency
    order: int
    group: PromptGroup


class WaitingQueue:
    """Sequences without a row. Adding and removing one takes few comparisons: logarithmic in the length of its lane.

    Args:
        cost: predicts what is left to compute of a prompt.
        memory: knows how much of it is computed already.
        shares: what keys and adapters have got.
    """

    def __init__(self, cost: CostModel, memory: PoolMemory, shares: TokenShares) -> None:
        self._cost = cost
        self._memory = memory
        self._shares = shares
        self._order = count()
        self._waiting: Counter[PromptGroup] = Counter()  # sequences that wait
        self._lanes: dict[Lane, list[_Entry]] = {}
        self._places: dict[PromptGroup, tuple[Lane, _Entry]] = {}
        self._blocked: dict[PromptGroup, None] = {}
        self._held: dict[PromptGroup, None] = {}  # groups that are blocked until the end of a pause

    def __len__(self) -> int:
        return self._waiting.total()

    def __iter__(self) -> Iterator[Sequence]:
        return (s for group in self._waiting for s in group.members if s.status is SequenceStatus.WAITING)

    def add(self, sequence: Sequence, held: bool = False) -> None:
        """Queues a sequence whose status is WAITING. If it is `held`, its group is not admitted before `release`."""
        if sequence.group not in self._waiting:
            blocked = self._held if held else self._blocked
            blocked[sequence.group] = None
        self._waiting[sequence.group] += 1

    def release(self) -> None:
        """Ends the wait of all groups that are held."""
        self._blocked |= self._held
        self._held = {}

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence whose status has changed already."""
        group = sequence.group
        self._waiting[group] -= 1
        if self._waiting[group] == 0:
            del self._waiting[group]
            self._held.pop(group, None)
            self._blocked.pop(group, None)
            self._leave_lane(group)
        elif group in self._places and _first(group) is None:
            self._block(group)

    def lanes(self) -> list[Lane]:
        """Begins a pass of admission: moves groups that are no longer blocked into lanes, and returns all lanes."""
        for group in list(self._blocked):
            if first := _first(group):
                cached = self._memory.cached(first)
                kind = prompt_kind(first, cached)
                lane = Lane(first.work_class, first.key, first.adapter, kind, first.pooling is not None)
                entry = _Entry(self.urgency(first, cached), next(self._order), group)
                insort(self._lanes.setdefault(lane, []), entry)
                self._places[group] = (lane, entry)
                del self._blocked[group]
        return list(self._lanes)

    def urgency(self, sequence: Sequence, computed: int) -> Urgency:
        """Orders prompts: by priority, then by seconds of prefill left, minus a credit for the time waited.

        Instead of subtracting the time waited, which changes all the time, it adds the time since which the sequence
        waits. The order is the same, because all sequences age at the same rate. What counts is what is left to
        compute, not the length.
        """
        left = self._cost.chunk_seconds(Chunk(sequence.length - computed, computed))
        return sequence.priority, left + _WAIT_CREDIT * sequence.served_at

    def best(self, lanes: Iterable[Lane], over_share: Container[WorkClass]) -> Sequence | None:
        """The next sequence to admit from these lanes, or None.

        Classes that are not `over_share` come first, then the best priority. Of each class, it is the turn of the key
        that is behind, then of that key's adapter that is behind, then of the most urgent sequence.
        """
        heads: dict[Lane, _Entry] = {}
        for lane in lanes:
            while (entries := self._lanes.get(lane)) and _first(entries[0].group) is None:
                self._block(entries[0].group)
            if entries:
                heads[lane] = entries[0]
        if not heads:
            return None
        tiers = {lane: (lane.work_class in over_share, head.urgency[0]) for lane, head in heads.items()}
        best = min(tiers.values())
        in_turn = [lane for lane in heads if tiers[lane] == best]
        for depth in (2, 3):  # the keys of each class, then the adapters of each key
            behind = self._shares.behind({lane.owner[:depth] for lane in in_turn})
            in_turn = [lane for lane in in_turn if lane.owner[:depth] in behind]
        return _first(min(heads[lane] for lane in in_turn).group)

    def _block(self, group: PromptGroup) -> None:
        self._blocked[group] = None
        self._leave_lane(group)

    def _leave_lane(self, group: PromptGroup) -> None:
        if group not in self._places:
            return
        lane, entry = self._places.pop(group)
        entries = self._lanes[lane]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._lanes[lane]

    def check_integrity(self) -> None:
        """Raises AssertionError if a waiting group has no place, or more than one, or if a waiting sequence has
        computed tokens."""
        assert not any(sequence.computed for sequence in self)
        assert set(self._waiting) == {*self._places, *self._blocked, *self._held}
        assert len(self._waiting) == len(self._places) + len(self._blocked) + len(self._held)
        for group, waiting in self._waiting.items():
            assert waiting == sum(s.status is SequenceStatus.WAITING for s in group.members)
        assert sum(map(len, self._lanes.values())) == len(self._places)
        assert all(entries == sorted(entries) for entries in self._lanes.values())


def _first(group: PromptGroup) -> Sequence | None:
    """The group's next sequence to admit, or None.

    A group's prompt is computed once, so the others wait until the first sequence has computed it. A preempted sequence
    waits until its launched samples are read back, because they belong to its tokens.
    """
    if group.awaits_prefix:
        return None
    leader = group.members[0]
    prompt_pending = leader.status in (SequenceStatus.WAITING, SequenceStatus.PREFILLING) and not leader.sampled
    members = [leader] if prompt_pending else group.members
    return next((s for s in members if s.status is SequenceStatus.WAITING and s.unread == 0), None)
