"""TrajectoryBuffer: trajectories between their last token and their fate."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from mlx_parallm.core import AdapterRef, TrajectoryCard
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError
from mlx_parallm.rl.groups import Drop, Group, Member, State


class TrajectoryBuffer:
    """At most `size` trajectories that have no fate yet, in whole groups.

    The drop rule: a group that does not fit makes the oldest groups go, complete or not, until it does; those that
    an update has taken stay, and a group that does not fit beside them goes itself. As many trajectories that were
    trained on or dropped are remembered, so that feedback on them is answered truly.

    Counts are of trajectories, by trainee: `collected`, `trained`, and `drops` by reason. `ended` is told of each
    group once its fate is known.

    Invariant: collected == held and not dropped + trained + dropped but for the aborted, which were never collected.
    """

    def __init__(self, size: int, ended: Callable[[Group], None] = lambda group: None) -> None:
        self.collected: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.drops: defaultdict[str, Counter[Drop]] = defaultdict(Counter)
        self._size = size
        self._ended = ended
        self._groups: dict[str, Group] = {}  # without a fate, oldest first
        self._past: deque[Group] = deque()
        self._members: dict[str, tuple[Group, Member]] = {}
        self._held = self._remembered = self._arrivals = 0

    # -- in --------------------------------------------------------------------------------------

    def add(self, group: Group) -> None:
        """Takes a new group; it, or older ones, may be dropped by the rule."""
        assert group.group_id not in self._groups
        self._arrivals += 1
        group.number = self._arrivals
        self.collected[group.trainee] += len(group.members)
        self._make_room(len(group.members))
        self._groups[group.group_id] = group
        self._held += len(group.members)
        self._members.update((member.trajectory.trajectory_id, (group, member)) for member in group.members)
        if self._held > self._size:
            self.drop(group, Drop.BUFFER_FULL)

    def _make_room(self, wanted: int) -> None:
        if self._held + wanted <= self._size:
            return
        free_to_go = [group for group in self._groups.values() if not group.taken]
        if self._held - sum(len(group.members) for group in free_to_go) + wanted > self._size:
            return
        for oldest in free_to_go:
            if self._held + wanted <= self._size:
                return
            self.drop(oldest, Drop.BUFFER_FULL)

    def lost(self, trainee: str, trajectories: int) -> None:
        """Counts what an aborted or failed request would have given."""
        self.drops[trainee][Drop.ABORTED] += trajectories

    # -- rewards ---------------------------------------------------------------------------------

    def feedback(self, trajectory_id: str, score: float) -> Group:
        """Gives a reward, in place of an earlier one.

        Raises:
            UnknownTrajectoryError: no such trajectory, or not any more.
            ConflictError: it was trained on, or dropped.
        """
        if trajectory_id not in self._members:
            raise UnknownTrajectoryError("No trajectory has this id, or it is forgotten by now.", param="trajectory_id")
        group, member = self._members[trajectory_id]
        if member.state is State.DROPPED:
            raise ConflictError(f"The trajectory was dropped ({member.reason}).", param="trajectory_id")
        if member.state not in (State.WAITING, State.SCORED):
            raise ConflictError("The trajectory was taken for training already.", param="trajectory_id")
        member.reward, member.state = score, State.SCORED
        return group

    def score(self, group: Group, rewards: Sequence[float]) -> None:
        """A scorer's rewards, in order; a trajectory that feedback has judged keeps that word."""
        for member, reward in zip(group.members, rewards, strict=True):
            if member.state is State.WAITING:
                member.reward, member.state = reward, State.SCORED

    def fail(self, group: Group) -> None:
        """The scorer failed: drops the group, unless it needs the scorer no more."""
        if group.waiting:
            self.drop(group, Drop.SCORING_FAILED)

    def expire(self, group_id: str) -> None:
        """The time for rewards is over: what is scored makes the group, if it is two at least."""
        group = self._groups.get(group_id)
        if group is None or not group.waiting:
            return
        for member in group.waiting:
            self._drop_member(group, member, Drop.TIMEOUT)
        if len(group.scored) < 2:
            self.drop(group, Drop.SINGLE)

    # -- out -------------------------------------------------------------------------------------

    def ready(self, trainee: str) -> tuple[Group, ...]:
        """Complete groups that no update has taken, oldest first."""
        return tuple(group for group in self._groups.values() if group.trainee == trainee and group.complete)

    def take(self, trainee: str, least: int | None = None) -> tuple[Group, ...]:
        """The oldest complete groups, until they hold `least` trajectories (None: all of them).

        Whoever takes groups ends each of them, by `finish` or `drop`.
        """
        taken: list[Group] = []
        trajectories = 0
        for group in self.ready(trainee):
            if least is not None and trajectories >= least:
                break
            taken.append(group)
            for member in group.scored:
                member.state = State.TRAINING
                trajectories += 1
        return tuple(taken)

    def finish(self, group: Group) -> None:
        """A group that was taken is trained on."""
        for member in group.in_state(State.TRAINING):
            member.state = State.TRAINED
            self.trained[group.trainee] += 1
        self._retire(group)

    def drop(self, group: Group, reason: Drop) -> None:
        for member in group.members:
            if member.state is not State.DROPPED:
                self._drop_member(group, member, reason)
        self._retire(group)

    def sweep(self, trainee: str, judge: Callable[[AdapterRef], Drop | None]) -> None:
        """Drops what no update has taken and `judge`, asked for the version that drew it, gives a reason against."""
        for group in [group for group in self._groups.values() if group.trainee == trainee and not group.taken]:
            if (reason := judge(group.adapter)) is not None:
                self.drop(group, reason)

    def _drop_member(self, group: Group, member: Member, reason: Drop) -> None:
        member.drop(reason)
        self.drops[group.trainee][reason] += 1

    def _retire(self, group: Group) -> None:
        del self._groups[group.group_id]
        self._held -= len(group.members)
        self._past.append(group)
        self._remembered += len(group.members)
        while self._remembered > self._size:
            forgotten = self._past.popleft()
            self._remembered -= len(forgotten.members)
            for member in forgotten.members:
                del self._members[member.trajectory.trajectory_id]
        self._ended(group)

    # -- figures ---------------------------------------------------------------------------------

    def holds(self, group: Group) -> bool:
        """Whether the group's fate is still open."""
        return self._groups.get(group.group_id) is group

    def unrewarded(self, trainee: str) -> int:
        """Trajectories that wait for a reward."""
        return sum(len(group.waiting) for group in self._of(trainee))

    def waiting(self, trainee: str) -> int:
        """Trajectories that no update has taken yet."""
        return sum(len(group.waiting) + len(group.scored) for group in self._of(trainee))

    def _of(self, trainee: str) -> Iterator[Group]:
        return (group for group in self._groups.values() if group.trainee == trainee)

    def cards(self, limit: int) -> tuple[TrajectoryCard, ...]:
        """Of the newest trajectories, newest first."""
        newest = sorted(chain(self._past, self._groups.values()), key=lambda group: -group.number)
        members: Iterable[Member] = chain.from_iterable(reversed(group.members) for group in newest)
        return tuple(member.card() for member, _ in zip(members, range(limit), strict=False))

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not agree."""
        held, past = list(self._groups.values()), list(self._past)
        assert sum(len(group.members) for group in held) == self._held <= self._size
        assert sum(len(group.members) for group in past) == self._remembered <= self._size
        known = {member.trajectory.trajectory_id: (group, member) for group in held + past for member in group.members}
        assert known == self._members
        for group in held:
            assert group.waiting or group.scored or group.taken
            assert not (group.taken and (group.waiting or group.scored))
        for member in chain.from_iterable(group.members for group in past):
            assert member.state in (State.TRAINED, State.DROPPED)
        for trainee, collected in self.collected.items():
            dropped = self.drops[trainee].total() - self.drops[trainee][Drop.ABORTED]
            members = chain.from_iterable(group.members for group in held if group.trainee == trainee)
            open_fates = sum(member.state is not State.DROPPED for member in members)
            assert collected == open_fates + self.trained[trainee] + dropped
