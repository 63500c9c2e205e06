"""The trajectory buffer under any order of events."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rl.fakes import groups_of, set_scores, trajectories

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.runs.records import Feedback
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState

NAME = "math"


def ref(version: int) -> AdapterRef:
    return AdapterRef(NAME, version)


# ---- any order of events ------------------------------------------------------------------------

SIZE = 9


class Life(RuleBasedStateMachine):
    """Groups of three versions of two adapters live and die in any order; each trajectory ends at most once."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.fed: set[str] = set()
        self.buffer = TrajectoryBuffer(SIZE, self.ended)
        self.groups: list[TrajectoryGroup] = []
        self.taken: list[TrajectoryGroup] = []

    def ended(self, group: TrajectoryGroup) -> None:
        self.ends.update(member.trajectory.trajectory_id for member in group.members)

    def some(self, data: st.DataObject, groups: list[TrajectoryGroup]) -> TrajectoryGroup:
        return data.draw(st.sampled_from(groups))

    @rule(
        n=st.integers(1, 4),
        version=st.integers(1, 3),
        adapter=st.sampled_from(["math", "tone"]),
        scorer=st.sampled_from([None, "exact"]),
    )
    def collect(self, n: int, version: int, adapter: str, scorer: str | None) -> None:
        group = TrajectoryGroup(adapter, trajectories(f"g{len(self.groups)}", AdapterRef(adapter, version), n, scorer))
        self.groups.append(group)
        self.buffer.add(group)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def score(self, data: st.DataObject) -> None:
        group = self.some(data, self.groups)
        before = [member.reward for member in group.members]
        set_scores(group, [float(index) for index in range(len(group.members))])
        assert all(now.reward == old for now, old in zip(group.members, before, strict=True) if old is not None)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        group = self.some(data, self.groups)
        self.buffer.drop(group, DropReason.SCORING_FAILED, group.waiting)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), index=st.integers(0, 3), score=st.floats(-1, 1))
    def feedback(self, data: st.DataObject, index: int, score: float) -> None:
        group = self.some(data, self.groups)
        member = group.members[index % len(group.members)]
        open_fate = member.state in (TrajectoryState.WAITING, TrajectoryState.SCORED)
        try:
            groups_of(self.buffer).apply(Feedback(member.trajectory.trajectory_id, score))
        except (ConflictError, UnknownTrajectoryError):
            assert not open_fate
        else:
            assert open_fate
            assert member.reward == score

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        group = self.some(data, self.groups)
        groups_of(self.buffer).expire(group.group_id)
        assert not group.waiting

    @rule(adapter=st.sampled_from(["math", "tone"]), least=st.none() | st.integers(1, 6))
    def take(self, adapter: str, least: int | None) -> None:
        ready = self.buffer.ready(adapter)
        taken = self.buffer.take(adapter, least)
        assert taken == ready[: len(taken)]
        counts = [len(group.in_state(TrajectoryState.TRAINING)) for group in taken]
        assert least is not None or len(taken) == len(ready)
        assert least is None or sum(counts[:-1]) < least
        assert least is None or sum(counts) >= least or len(taken) == len(ready)
        self.taken += taken

    @precondition(lambda self: self.taken)
    @rule(
        data=st.data(),
        reason=st.none() | st.sampled_from([DropReason.HELD, DropReason.SKIPPED, DropReason.ZERO_VARIANCE]),
    )
    def end(self, data: st.DataObject, reason: DropReason | None) -> None:
        group = self.some(data, self.taken)
        self.taken.remove(group)
        if reason is None:
            self.trained.update(m.trajectory.trajectory_id for m in group.in_state(TrajectoryState.TRAINING))
        self.buffer.finish(group, reason)
        assert not group.taken

    @rule(adapter=st.sampled_from(["math", "tone"]), oldest=st.integers(1, 3))
    def sweep(self, adapter: str, oldest: int) -> None:
        self.buffer.sweep(adapter, lambda drawn_by: DropReason.STALE if drawn_by.version < oldest else None)
        left = [group for group in self.groups if group.adapter == adapter and (group.waiting or group.scored)]
        assert all(version.version >= oldest for group in left for version in group.versions)

    @rule(n=st.integers(1, 4))
    def lose(self, n: int) -> None:
        self.buffer.drops["math"][DropReason.ABORTED] += n

    @invariant()
    def books_agree(self) -> None:
        self.buffer.check_integrity()
        assert all(count == 1 for count in self.ends.values())
        assert all(count == 1 for count in self.trained.values())
        assert all(self.buffer.holds(group) for group in self.taken)
        held = {m.trajectory.trajectory_id for g in self.groups if self.buffer.holds(g) for m in g.members}
        everything = {m.trajectory.trajectory_id for g in self.groups for m in g.members}
        assert held | self.ends.keys() == everything
        assert not held & self.ends.keys()
        assert sum(self.buffer.trained.values()) == len(self.trained)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_life = Life.TestCase
