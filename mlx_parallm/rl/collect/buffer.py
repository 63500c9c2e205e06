"""TrajectoryBuffer: the trajectories that wait for a reward or an update."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from mlx_parallm.core import AdapterRef, TrajectoryCard
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError
from mlx_parallm.rl.collect.groups import DropReason, GroupMember, TrajectoryGroup, TrajectoryState


class TrajectoryBuffer:
    """Holds at most `size` trajectories, in whole groups. A group leaves when all its members are trained or dropped.

    To make room for a new group, the oldest groups without a reward are dropped first, then the oldest ones with a
    reward. Groups that an update is using stay; if a new group does not fit beside them, it is dropped itself. The last
    `size` trajectories that left are remembered, so that feedback on them gets an error that says what became of them.

    `collected`, `trained` and `drops` (by reason) count trajectories, by adapter name. `on_end` is called with each
    group that leaves.

    Invariant: collected == open + trained + dropped. Open trajectories are neither trained nor dropped. Aborted ones do
    not count here, because they were never collected.
    """

    def __init__(self, size: int, on_end: Callable[[TrajectoryGroup], None] = lambda group: None) -> None:
        self.collected: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.drops: defaultdict[str, Counter[DropReason]] = defaultdict(Counter)
        self._size = size
        self._on_end = on_end
        self._groups: dict[str, TrajectoryGroup] = {}  # oldest first
        self._past: deque[TrajectoryGroup] = deque()
        self._members: dict[str, tuple[TrajectoryGroup, GroupMember]] = {}
        self._held = self._remembered = self._arrivals = 0

    # -- in --------------------------------------------------------------------------------------

    def add(self, group: TrajectoryGroup) -> None:
        """Adds a new group. It, or older groups, may be dropped for lack of room."""
        assert group.group_id not in self._groups
        self._arrivals += 1
        group.number = self._arrivals
        size = len(group.members)
        self.collected[group.adapter] += size
        if self._held + size > self._size:
            self._make_room(size)
        self._groups[group.group_id] = group
        self._held += size
        self._members.update((member.trajectory.trajectory_id, (group, member)) for member in group.members)
        if self._held > self._size:
            self.drop(group, DropReason.BUFFER_FULL)

    def _make_room(self, wanted: int) -> None:
        """Drops groups until `wanted` more trajectories fit, or none if they cannot fit."""
        droppable = [group for group in self._groups.values() if not group.taken]
        droppable.sort(key=lambda group: bool(group.scored))  # stable, so each part is oldest first
        if self._held - sum(len(group.members) for group in droppable) + wanted > self._size:
            return
        for oldest in droppable:
            if self._held + wanted <= self._size:
                return
            self.drop(oldest, DropReason.BUFFER_FULL)

    def count_aborted(self, adapter: str, trajectories: int) -> None:
        """Counts the trajectories of a request that was aborted or failed."""
        self.drops[adapter][DropReason.ABORTED] += trajectories

    # -- rewards ---------------------------------------------------------------------------------

    def feedback(self, trajectory_id: str, score: float) -> TrajectoryGroup:
        """Sets the reward of a trajectory, in place of an earlier one. Returns its group.

        Raises:
            UnknownTrajectoryError: no such trajectory, or it is forgotten.
            ConflictError: it was taken for training, or dropped.
        """
        if trajectory_id not in self._members:
            raise UnknownTrajectoryError("No trajectory has this id, or it is forgotten by now.", param="trajectory_id")
        group, member = self._members[trajectory_id]
        if member.state is TrajectoryState.DROPPED:
            raise ConflictError(
                f"The trajectory was dropped ({member.reason}): it will not be trained on.", param="trajectory_id"
            )
        if member.state not in (TrajectoryState.WAITING, TrajectoryState.SCORED):
            raise ConflictError(
                "The trajectory was taken for training already; feedback counts only before that.",
                param="trajectory_id",
            )
        member.reward, member.state, member.from_feedback = score, TrajectoryState.SCORED, True
        return group

    def score(self, group: TrajectoryGroup, rewards: Sequence[float]) -> None:
        """Sets a scorer's rewards, in order of the members. Members with feedback keep their rewards."""
        for member, reward in zip(group.members, rewards, strict=True):
            if member.state is TrajectoryState.WAITING:
                member.reward, member.state = reward, TrajectoryState.SCORED

    def expire(self, group_id: str) -> None:
        """Drops the members without a reward, because the time limit for rewards has passed."""
        if (group := self._groups.get(group_id)) is not None:
            self.drop(group, DropReason.TIMEOUT, group.waiting)

    # -- out -------------------------------------------------------------------------------------

    def ready(self, adapter: str) -> tuple[TrajectoryGroup, ...]:
        """Complete groups that no update has taken, oldest first."""
        return tuple(group for group in self._groups.values() if group.adapter == adapter and group.complete)

    def take(self, adapter: str, least: int | None = None) -> tuple[TrajectoryGroup, ...]:
        """Takes the oldest complete groups, until they have at least `least` trajectories; None: all complete groups.

        Only members with a reward are taken. The caller must call `finish` for each group.
        """
        taken: list[TrajectoryGroup] = []
        trajectories = 0
        for group in self.ready(adapter):
            if least is not None and trajectories >= least:
                break
            taken.append(group)
            for member in group.scored:
                member.state = TrajectoryState.TRAINING
                trajectories += 1
        return tuple(taken)

    def finish(self, group: TrajectoryGroup, reason: DropReason | None = None) -> None:
        """Marks the taken members as trained or, if there is a `reason`, as dropped. Other members keep their state."""
        taken = group.in_state(TrajectoryState.TRAINING)
        if reason is not None:
            self.drop(group, reason, taken)
            return
        for member in taken:
            member.state = TrajectoryState.TRAINED
        self.trained[group.adapter] += len(taken)
        self._remove_if_ended(group)

    def drop(self, group: TrajectoryGroup, reason: DropReason, members: Sequence[GroupMember] | None = None) -> None:
        """Drops these members of the group; None: all that no update has taken."""
        for member in (*group.waiting, *group.scored) if members is None else members:
            member.state, member.reason = TrajectoryState.DROPPED, reason
            self.drops[group.adapter][reason] += 1
        self._remove_if_ended(group)

    def sweep(self, adapter: str, reason_against: Callable[[AdapterRef], DropReason | None]) -> None:
        """Drops the members that no update has taken, if `reason_against` returns a reason for their version."""
        for group in [*self._of(adapter)]:
            if (reason := reason_against(group.version)) is not None:
                self.drop(group, reason)

    def _remove_if_ended(self, group: TrajectoryGroup) -> None:
        if not self.holds(group) or group.waiting or group.scored or group.taken:
            return
        del self._groups[group.group_id]
        self._held -= len(group.members)
        self._past.append(group)
        self._remembered += len(group.members)
        while self._remembered > self._size:
            forgotten = self._past.popleft()
            self._remembered -= len(forgotten.members)
            for member in forgotten.members:
                del self._members[member.trajectory.trajectory_id]
        self._on_end(group)

    # -- figures ---------------------------------------------------------------------------------

    def holds(self, group: TrajectoryGroup) -> bool:
        """Whether the group is still in the buffer: some member is neither trained nor dropped."""
        return self._groups.get(group.group_id) is group

    def unrewarded(self, adapter: str) -> int:
        """Trajectories that wait for a reward."""
        return sum(len(group.waiting) for group in self._of(adapter))

    def waiting(self, adapter: str) -> int:
        """Trajectories that no update has taken yet."""
        return sum(len(group.waiting) + len(group.scored) for group in self._of(adapter))

    def _of(self, adapter: str) -> Iterator[TrajectoryGroup]:
        return (group for group in self._groups.values() if group.adapter == adapter)

    def cards(self, limit: int) -> tuple[TrajectoryCard, ...]:
        """The newest trajectories, newest first."""
        newest = sorted(chain(self._past, self._groups.values()), key=lambda group: -group.number)
        members: Iterable[GroupMember] = chain.from_iterable(reversed(group.members) for group in newest)
        return tuple(member.card() for member, _ in zip(members, range(limit), strict=False))

    def check_integrity(self) -> None:
        """Raises AssertionError if counts and contents disagree."""
        held, past = list(self._groups.values()), list(self._past)
        assert sum(len(group.members) for group in held) == self._held <= self._size
        assert sum(len(group.members) for group in past) == self._remembered <= self._size
        known = {member.trajectory.trajectory_id: (group, member) for group in held + past for member in group.members}
        assert known == self._members
        for group in held:
            assert group.waiting or group.scored or group.taken
        for member in chain.from_iterable(group.members for group in past):
            assert member.state in (TrajectoryState.TRAINED, TrajectoryState.DROPPED)
        for adapter, collected in self.collected.items():
            dropped = self.drops[adapter].total() - self.drops[adapter][DropReason.ABORTED]
            members = chain.from_iterable(group.members for group in held if group.adapter == adapter)
            open_members = sum(m.state not in (TrajectoryState.TRAINED, TrajectoryState.DROPPED) for m in members)
            assert collected == open_members + self.trained[adapter] + dropped
