"""TrajectoryBuffer: trajectories between their last token and their fate."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from mlx_parallm.core import AdapterRef, TrajectoryCard
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError
from mlx_parallm.rl.groups import Drop, Group, Member, State


class TrajectoryBuffer:
    """At most `size` trajectories, in whole groups: those of which at least one has no fate yet.

    The drop rule: to make room for a new group the oldest groups without a reward are dropped, then the oldest with
    one. Groups that an update has taken stay, and a group that does not fit beside them is dropped itself. As many
    trajectories that were trained on or dropped are remembered, so that feedback on them is answered truly.

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
        untaken = [group for group in self._groups.values() if not group.taken]
        free_to_go = sorted(untaken, key=lambda group: bool(group.scored))  # stable: oldest first
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
            raise ConflictError(
                f"The trajectory was dropped ({member.reason}): it will not be trained on.", param="trajectory_id"
            )
        if member.state not in (State.WAITING, State.SCORED):
            raise ConflictError(
                "The trajectory was taken for training already; feedback counts only before that.",
                param="trajectory_id",
            )
        member.reward, member.state, member.judged = score, State.SCORED, True
        return group

    def score(self, group: Group, rewards: Sequence[float]) -> None:
        """A scorer's rewards, in order; a trajectory that feedback has judged keeps that word."""
        for member, reward in zip(group.members, rewards, strict=True):
            if member.state is State.WAITING:
                member.reward, member.state = reward, State.SCORED

    def fail(self, group: Group) -> None:
        """The scorer failed: drops what has no reward; what a person has judged stays."""
        self._drop_all(group, group.waiting, Drop.SCORING_FAILED)

    def expire(self, group_id: str) -> None:
        """The time for rewards is over: drops what has none."""
        if (group := self._groups.get(group_id)) is not None:
            self._drop_all(group, group.waiting, Drop.TIMEOUT)

    # -- out -------------------------------------------------------------------------------------

    def ready(self, trainee: str) -> tuple[Group, ...]:
        """Complete groups that no update has taken, oldest first."""
        return tuple(group for group in self._groups.values() if group.trainee == trainee and group.complete)

    def take(self, trainee: str, least: int | None = None) -> tuple[Group, ...]:
        """The oldest complete groups, until they hold `least` trajectories (None: all of them).

        What is taken of a group are the trajectories that have a reward. Whoever takes groups calls `finish` for each.
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

    def finish(self, group: Group, reason: Drop | None = None) -> None:
        """Ends what was taken of a group: it is trained on, or dropped for `reason`. The rest of it still waits."""
        taken = group.in_state(State.TRAINING)
        if reason is not None:
            self._drop_all(group, taken, reason)
            return
        for member in taken:
            member.state = State.TRAINED
        self.trained[group.trainee] += len(taken)
        self._retire_if_ended(group)

    def drop_low(self, group: Group, threshold: float) -> None:
        """Drops what was taken of a group and has a reward that is not above `threshold`."""
        low = [m for m in group.in_state(State.TRAINING) if m.reward is not None and m.reward <= threshold]
        self._drop_all(group, low, Drop.LOW_REWARD)

    def drop(self, group: Group, reason: Drop) -> None:
        """Drops what no update has taken of a group."""
        self._drop_all(group, (*group.waiting, *group.scored), reason)

    def sweep(self, trainee: str, judge: Callable[[AdapterRef], Drop | None]) -> None:
        """Drops what no update has taken and `judge`, asked for the version that drew it, gives a reason against."""
        for group in [*self._of(trainee)]:
            if (reason := judge(group.adapter)) is not None:
                self.drop(group, reason)

    def _drop_all(self, group: Group, members: Sequence[Member], reason: Drop) -> None:
        for member in members:
            member.drop(reason)
            self.drops[group.trainee][reason] += 1
        self._retire_if_ended(group)

    def _retire_if_ended(self, group: Group) -> None:
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
        for member in chain.from_iterable(group.members for group in past):
            assert member.state in (State.TRAINED, State.DROPPED)
        for trainee, collected in self.collected.items():
            dropped = self.drops[trainee].total() - self.drops[trainee][Drop.ABORTED]
            members = chain.from_iterable(group.members for group in held if group.trainee == trainee)
            open_fates = sum(member.state not in (State.TRAINED, State.DROPPED) for member in members)
            assert collected == open_fates + self.trained[trainee] + dropped
