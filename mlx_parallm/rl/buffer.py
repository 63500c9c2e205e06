"""TrajectoryBuffer: the trajectories that wait for a reward or an update."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import QueueFullError
from mlx_parallm.rl.trajectories import (
    NEVER_COLLECTED,
    DropReason,
    GroupKey,
    GroupMember,
    TrajectoryGroup,
    TrajectoryState,
)


class TrajectoryBuffer:
    """Holds at most `size` trajectories, in whole groups. A group leaves when all its members are trained or dropped.

    To make room, groups of the owner that has the most are dropped: the oldest ones without a reward first. Groups that
    an update is using stay; if a group does not fit beside them, it is dropped itself. The last `size` trajectories
    that left are remembered, so that feedback on them gets an error that says what became of them.

    `collected`, `trained` and `drops` (by reason) count trajectories, by adapter name; each turn of an episode is one.
    `known`: the groups that are held and those that are remembered, by number, oldest first.
    `on_end` is called with each group that leaves, `on_drop` with trajectories that are dropped and why.

    Invariant: collected == open + trained + dropped. Open trajectories are neither trained nor dropped. Those of
    the reasons NEVER_COLLECTED do not count here.
    """

    def __init__(
        self,
        size: int,
        on_end: Callable[[TrajectoryGroup], None] = lambda group: None,
        on_drop: Callable[[Sequence[Trajectory], str], None] = lambda trajectories, reason: None,
    ) -> None:
        self.collected: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.drops: defaultdict[str, Counter[DropReason]] = defaultdict(Counter)
        self.known: dict[int, TrajectoryGroup] = {}
        self._size = size
        self._on_end = on_end
        self._on_drop = on_drop
        self._groups: dict[GroupKey, TrajectoryGroup] = {}  # oldest first
        self._past: deque[TrajectoryGroup] = deque()
        self._past_keys: Counter[GroupKey] = Counter()
        self._members: dict[str, tuple[TrajectoryGroup, GroupMember]] = {}
        self._held = self._remembered = self._arrivals = 0

    # -- in --------------------------------------------------------------------------------------

    def add(self, group: TrajectoryGroup) -> None:
        """Adds a new group. It, or older groups, may be dropped for lack of room."""
        assert group.key not in self._groups
        self._arrivals += 1
        group.number = self._arrivals
        self._groups[group.key] = self.known[group.number] = group
        self._members.update((t.trajectory_id, (group, member)) for member in group.members for t in member.turns)
        self._count_in(group, [turn for member in group.members for turn in member.turns])

    def extend(self, group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> None:
        """Adds answers, or a turn of an episode, to an open group. It, or older groups, may be dropped for lack of
        room. A turn that is replaced is dropped."""
        assert self.holds(group)
        assert not group.closed
        for trajectory in trajectories:
            member, replaced = group.add(trajectory)
            if replaced is not None:
                if member.is_open:  # otherwise it was dropped with its episode
                    self.drops[group.adapter][DropReason.REPLACED] += 1
                    self._on_drop([replaced], DropReason.REPLACED)
                del self._members[replaced.trajectory_id]
                self._held -= 1
            self._members[trajectory.trajectory_id] = (group, member)
            if not member.is_open:  # the episode was dropped, and so is this turn
                self._count_out(group, member, 1)
                self._on_drop([trajectory], member.reason or member.state.value)
        self._count_in(group, trajectories)

    def _count_in(self, group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> None:
        self.collected[group.adapter] += len(trajectories)
        if self._held + len(trajectories) > self._size:
            self._make_room(len(trajectories), beside=group)
        self._held += len(trajectories)
        if self._held > self._size:
            self.drop(group, DropReason.BUFFER_FULL)

    def _make_room(self, wanted: int, beside: TrajectoryGroup) -> None:
        """Drops groups until `wanted` more trajectories fit, or none if they cannot fit. Each time it is a group of the
        owner that holds the most, so no owner's groups push out those of one that holds less."""
        droppable = [group for group in self._groups.values() if not group.taken and group is not beside]
        droppable.sort(key=lambda group: bool(group.scored))  # stable, so each part is oldest first
        if self._held - sum(group.trajectories for group in droppable) + wanted > self._size:
            return
        held = Counter[str]()
        for group in self._groups.values():
            held[group.owner] += group.trajectories
        while self._held + wanted > self._size:
            oldest = max(droppable, key=lambda group: held[group.owner])  # the first of those with the same owner
            droppable.remove(oldest)
            held[oldest.owner] -= oldest.trajectories
            self.drop(oldest, DropReason.BUFFER_FULL)

    def check_room(self, source: str, wanted: int, coming: Mapping[str, int]) -> None:
        """Checks that `wanted` trajectories of a source fit without dropping others. While several sources give groups,
        each may have an equal part of the buffer.

        `coming`: trajectories by source that are on their way into the buffer.

        Raises:
            QueueFullError: they do not fit now.
        """
        held = self._held + sum(coming.values())
        if held + wanted > self._size:
            raise QueueFullError(
                f"{held} of {self._size} trajectories wait for training, and {wanted} more do not fit; send them later"
            )
        waiting = {name: sum(sizes) + coming.get(name, 0) for name, sizes in self.given_sizes().items()}
        part = self._size // len({source, *waiting, *coming})
        own = waiting.get(source, coming.get(source, 0))
        if own + wanted > part:
            raise QueueFullError(
                f"{own} trajectories of {source} wait, and its part of the buffer is {part}; send more of them later"
            )

    @property
    def room(self) -> int:
        """How many more trajectories fit without dropping others."""
        return self._size - self._held

    def given_sizes(self) -> dict[str, list[int]]:
        """The sizes of the groups that were given and that no update has taken, by source."""
        sizes: dict[str, list[int]] = {}
        for group in self._groups.values():
            if group.was_given and not group.taken:
                sizes.setdefault(group.source, []).append(len(group.members))
        return sizes

    def named(self, group_id: str) -> list[TrajectoryGroup]:
        """The groups with this id that have not left, oldest first: at most one of each owner."""
        return [group for (_, name), group in self._groups.items() if name == group_id]

    def find(self, group_id: str, owner: str | None = "") -> TrajectoryGroup | None:
        """The group of this id and owner, if it has not left. `owner` None: the oldest one of this id."""
        if owner is not None:
            return self._groups.get((owner, group_id))
        return next(iter(self.named(group_id)), None)

    def member(self, trajectory_id: str) -> tuple[TrajectoryGroup, GroupMember] | None:
        """The group and the member of a trajectory, also of one that has left; None: it is not known here."""
        return self._members.get(trajectory_id)

    def called(self, name: str) -> Iterator[TrajectoryGroup]:
        """The groups with this id, those that are held first, and the group of the trajectory with this id; also those
        that have left, the last one first."""
        yield from self.named(name)
        if (known := self._members.get(name)) is not None:
            yield known[0]
        yield from (group for group in reversed(self._past) if group.group_id == name)

    def has_left(self, group_id: str, owner: str | None = "") -> bool:
        """Whether a group of this id and owner has left, and is still remembered. `owner` None: of any."""
        if owner is not None:
            return (owner, group_id) in self._past_keys
        return any(name == group_id for _, name in self._past_keys)

    # -- out -------------------------------------------------------------------------------------

    def ready(self, adapter: str, signal: Signal = Signal.REWARDS) -> tuple[TrajectoryGroup, ...]:
        """Complete groups with this signal that no update has taken, oldest first."""
        return tuple(group for group in self.of(adapter) if group.signal is signal and group.complete)

    def take(self, name: str, least: int | None = None, signal: Signal = Signal.REWARDS) -> Sequence[TrajectoryGroup]:
        """Takes the oldest complete groups, until they have at least `least` members; None: all complete groups.

        Only members with a reward are taken. The caller must call `finish` or `give_back` for each
        group.
        """
        taken: list[TrajectoryGroup] = []
        members = 0
        for group in self.ready(name, signal):
            if least is not None and members >= least:
                break
            taken.append(group)
            for member in group.scored:
                member.state = TrajectoryState.TRAINING
                members += 1
        return tuple(taken)

    def finish(self, group: TrajectoryGroup, reason: DropReason | None = None) -> None:
        """Marks the taken members as trained or, if there is a `reason`, as dropped. Other members keep their state."""
        taken = group.in_state(TrajectoryState.TRAINING)
        if reason is not None:
            self.drop(group, reason, taken)
            return
        for member in taken:
            member.state = TrajectoryState.TRAINED
            self._count_out(group, member, len(member.turns))
        self._remove_if_ended(group)

    def give_back(self, group: TrajectoryGroup) -> None:
        """Undoes `take`: an update can take the members again."""
        for member in group.in_state(TrajectoryState.TRAINING):
            member.state = TrajectoryState.SCORED

    def drop(self, group: TrajectoryGroup, reason: DropReason, members: Sequence[GroupMember] | None = None) -> None:
        """Drops these members of the group; None: all that no update has taken."""
        for member in (*group.waiting, *group.scored) if members is None else members:
            member.state, member.reason = TrajectoryState.DROPPED, reason
            self._count_out(group, member, len(member.turns))
            self._on_drop(member.turns, reason)
        self._remove_if_ended(group)

    def drop_all(self, adapter: str, reason: DropReason) -> None:
        """Drops all groups of an adapter, which is not in training any more."""
        for group in [*self.of(adapter)]:
            self.drop(group, reason)

    def drop_own(self, adapter: str, prefix: str, reason: DropReason) -> None:
        """Drops the groups of an adapter whose ids the server has made and which begin with `prefix`, unless an update
        has taken them."""
        for group in [*self.of(adapter)]:
            if group.group_id.startswith(prefix) and not group.named and not group.taken:
                self.drop(group, reason)

    def sweep(self, adapter: str, reason_against: Callable[[AdapterRef], DropReason | None]) -> None:
        """Drops the members that no update has taken, if `reason_against` returns a reason for a version that
        sampled them."""
        for group in [*self.of(adapter)]:
            reasons: dict[AdapterRef | None, DropReason | None] = {
                version: reason_against(version) for version in group.versions
            }
            for member in (*group.waiting, *group.scored):
                if reason := next(filter(None, (reasons.get(turn.adapter) for turn in member.turns)), None):
                    self.drop(group, reason, [member])

    def _count_out(self, group: TrajectoryGroup, member: GroupMember, trajectories: int) -> None:
        if member.reason is not None:
            self.drops[group.adapter][member.reason] += trajectories
        elif member.state is TrajectoryState.TRAINED:
            self.trained[group.adapter] += trajectories

    def _remove_if_ended(self, group: TrajectoryGroup) -> None:
        if not self.holds(group) or group.waiting or group.scored or group.taken:
            return
        group.closed = True
        del self._groups[group.key]
        self._held -= group.trajectories
        self._past.append(group)
        self._past_keys[group.key] += 1
        self._remembered += group.trajectories
        while self._remembered > self._size:
            self._forget(self._past.popleft())
        self._on_end(group)

    def forget(self, adapter: str) -> None:
        """Forgets the groups of an adapter that have left."""
        of_adapter = [group for group in self._past if group.adapter == adapter]
        for group in of_adapter:
            self._past.remove(group)
            self._forget(group)

    def remove(self, trajectory_ids: Collection[str], reason: DropReason) -> None:
        """Drops the groups that have one of these trajectories, and forgets them. No update may have taken them."""
        groups = {id(known[0]): known[0] for one in trajectory_ids if (known := self._members.get(one)) is not None}
        for group in groups.values():
            if self.holds(group):
                self.drop(group, reason)
            if group in self._past:
                self._past.remove(group)
                self._forget(group)

    def _forget(self, group: TrajectoryGroup) -> None:
        self._remembered -= group.trajectories
        del self.known[group.number]
        self._past_keys[group.key] -= 1
        if not self._past_keys[group.key]:
            del self._past_keys[group.key]
        for turn in chain.from_iterable(member.turns for member in group.members):
            del self._members[turn.trajectory_id]

    # -- figures ---------------------------------------------------------------------------------

    def holds(self, group: TrajectoryGroup) -> bool:
        """Whether the group is still in the buffer: some member is neither trained nor dropped."""
        return self._groups.get(group.key) is group

    def unrewarded(self, adapter: str) -> int:
        """Trajectories that wait for a reward."""
        return sum(len(member.turns) for group in self.of(adapter) for member in group.waiting)

    def waiting(self, adapter: str) -> int:
        """Trajectories that no update has taken yet."""
        groups = self.of(adapter)
        return sum(len(member.turns) for group in groups for member in (*group.waiting, *group.scored))

    def still_open(self, adapter: str) -> int:
        """Groups that wait for more members."""
        return sum(not group.closed for group in self.of(adapter))

    def of(self, adapter: str) -> Iterator[TrajectoryGroup]:
        """The groups of an adapter, oldest first."""
        return (group for group in self._groups.values() if group.adapter == adapter)

    def newest(self, limit: int) -> list[tuple[Trajectory, GroupMember]]:
        """The newest trajectories, each with its member, newest first."""
        members = (member for group in reversed(self.known.values()) for member in reversed(group.members))
        return list(islice(((turn, member) for member in members for turn in reversed(member.turns)), limit))

    def check_integrity(self) -> None:
        """Raises AssertionError if counts and contents disagree."""
        held, past = list(self._groups.values()), list(self._past)
        assert sum(group.trajectories for group in held) == self._held <= self._size
        assert sum(group.trajectories for group in past) == self._remembered <= self._size
        assert Counter(group.key for group in past) == self._past_keys
        assert {group.number: group for group in held + past} == self.known
        assert sorted(self.known) == [*self.known]
        every = [(group, member, turn) for group in held + past for member in group.members for turn in member.turns]
        assert {turn.trajectory_id: (group, member) for group, member, turn in every} == self._members
        for group in held:
            assert group.waiting or group.scored or group.taken
        for member in chain.from_iterable(group.members for group in past):
            assert member.state in (TrajectoryState.TRAINED, TrajectoryState.DROPPED)
        for adapter, collected in self.collected.items():
            dropped = self.drops[adapter].total() - sum(self.drops[adapter][reason] for reason in NEVER_COLLECTED)
            members = list(chain.from_iterable(group.members for group in held if group.adapter == adapter))
            in_progress = sum(len(m.turns) for m in members if m.is_open or m.state is TrajectoryState.TRAINING)
            assert collected == in_progress + self.trained[adapter] + dropped
