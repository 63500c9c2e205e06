"""Groups in the trajectory buffer, under any order of answers, turns, rewards, updates and ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rl.fakes import groups_of, set_scores, trajectories

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.runs.records import Closed, EpisodeReward, Feedback, TokenRewards
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState, group_name

SIZE = 12
NAMES, EPISODES, ADAPTERS = ("", "g", "h"), ("", "a", "b"), ("math", "tone")


class Life(RuleBasedStateMachine):
    """Groups of one request, and groups that requests name, of three versions of two adapters. Each trajectory ends
    once, trained or dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.buffer = TrajectoryBuffer(SIZE, self.ended)
        self.groups = groups_of(self.buffer)
        self.known: list[TrajectoryGroup] = []
        self.made: list[str] = []
        self.taken: list[TrajectoryGroup] = []

    def ended(self, group: TrajectoryGroup) -> None:
        assert group.closed
        self.ends.update(turn.trajectory_id for member in group.members for turn in member.turns)

    # -- answers ---------------------------------------------------------------------------------

    @rule(
        n=st.integers(1, 4),
        version=st.integers(1, 3),
        adapter=st.sampled_from(ADAPTERS),
        scorer=st.sampled_from([None, "exact"]),
    )
    def collect(self, n: int, version: int, adapter: str, scorer: str | None) -> None:
        made = trajectories(f"r{len(self.made)}", AdapterRef(adapter, version), n, scorer)
        self.made += [one.trajectory_id for one in made]
        self.known.append(TrajectoryGroup(adapter, made))
        self.buffer.add(self.known[-1])

    @rule(
        name=st.sampled_from(NAMES),
        episode=st.sampled_from(EPISODES),
        turn=st.none() | st.integers(0, 2),
        size=st.none() | st.integers(1, 3),
        version=st.integers(1, 3),
    )
    def turn(self, name: str, episode: str, turn: int | None, size: int | None, version: int) -> None:
        spec = CollectionSpec(group_id=name, group_size=size, episode_id=episode, turn=turn)
        request = f"r{len(self.made)}"
        (one,) = trajectories(request, AdapterRef("math", version), 1)
        one = replace(one, collection=spec, group_id=group_name(spec) or request)
        self.made.append(one.trajectory_id)
        known = self.buffer.find(one.group_id)
        was_open = known is None or not known.closed
        added = self.groups.add("math", [one])
        assert was_open or not group_name(spec) or added.dropped is DropReason.CLOSED

    # -- rewards ---------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(data=st.data(), fails=st.booleans())
    def scorer(self, data: st.DataObject, fails: bool) -> None:
        group = data.draw(st.sampled_from(self.known))
        before = [member.reward for member in group.members]
        if fails:
            self.buffer.drop(group, DropReason.SCORING_FAILED, group.waiting)
        else:
            set_scores(group, [float(index) for index in range(len(group.members))])
        assert all(now.reward == old for now, old in zip(group.members, before, strict=True) if old is not None)

    @precondition(lambda self: self.made)
    @rule(data=st.data(), score=st.floats(-1, 1), tokens=st.booleans())
    def feedback(self, data: st.DataObject, score: float, tokens: bool) -> None:
        name = data.draw(st.sampled_from(self.made))
        _, member = self.buffer.member(name) or (None, None)
        can = member is not None and member.is_open
        try:
            self.groups.apply(TokenRewards(name, (score, 0.0)) if tokens else Feedback(name, score))
        except (ConflictError, UnknownTrajectoryError):
            assert not can
        else:
            assert can

    @rule(name=st.sampled_from(NAMES), episode=st.sampled_from(EPISODES[1:]), score=st.floats(-1, 1))
    def reward_episode(self, name: str, episode: str, score: float) -> None:
        found = self.buffer.find(name or f"episode-{episode}")
        member = None if found is None else found.episode(episode)
        can = member is not None and member.is_open
        try:
            self.groups.apply(EpisodeReward(episode, name, score))
        except (ConflictError, UnknownTrajectoryError):
            assert not can
        else:
            assert can
            assert member.own_reward == score

    # -- ends ------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["g", "h", "episode-a", "episode-b"]))
    def close(self, name: str) -> None:
        try:
            closed = self.groups.apply(Closed(name))
        except (ConflictError, UnknownTrajectoryError):
            assert self.buffer.find(name) is None
        else:
            assert closed.closed
            assert not closed.waiting

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["g", "h", "episode-a", *(group.group_id for group in self.known)]))
        self.groups.expire(name)
        assert (found := self.buffer.find(name)) is None or not found.waiting

    @rule(adapter=st.sampled_from(ADAPTERS), least=st.none() | st.integers(1, 6))
    def take(self, adapter: str, least: int | None) -> None:
        ready = self.buffer.ready(adapter)
        taken = self.buffer.take(adapter, least)
        assert taken == ready[: len(taken)], "the oldest"
        counts = [len(group.in_state(TrajectoryState.TRAINING)) for group in taken]
        assert len(taken) == len(ready) or (least is not None and sum(counts) >= least)
        assert least is None or sum(counts[:-1]) < least
        self.taken += taken

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), reason=st.sampled_from([None, DropReason.HELD, DropReason.ZERO_VARIANCE]))
    def end(self, data: st.DataObject, reason: DropReason | None) -> None:
        group = data.draw(st.sampled_from(self.taken))
        self.taken.remove(group)
        if reason is None:
            members = group.in_state(TrajectoryState.TRAINING)
            self.trained.update(turn.trajectory_id for member in members for turn in member.turns)
        self.buffer.finish(group, reason)
        assert not group.taken

    @rule(adapter=st.sampled_from(ADAPTERS), oldest=st.integers(1, 3))
    def sweep(self, adapter: str, oldest: int) -> None:
        self.buffer.sweep(adapter, lambda version: DropReason.STALE if version.version < oldest else None)
        left = (member for group in self.buffer.of(adapter) for member in (*group.waiting, *group.scored))
        assert all(turn.adapter.version >= oldest for member in left for turn in member.turns)

    @rule(n=st.integers(1, 4))
    def lose(self, n: int) -> None:
        self.buffer.drops["math"][DropReason.ABORTED] += n

    @invariant()
    def books_agree(self) -> None:
        self.buffer.check_integrity()
        assert sum(self.buffer.collected.values()) == len(self.made)
        assert sum(self.buffer.trained.values()) == len(self.trained)
        assert all(count == 1 for count in (*self.ends.values(), *self.trained.values()))
        assert all(self.buffer.holds(group) for group in self.taken)
        for group in self.known:
            ids = {member.trajectory.trajectory_id for member in group.members}
            assert not ids & self.ends.keys() if self.buffer.holds(group) else ids <= self.ends.keys()
        for group in self.buffer.ready("math"):
            assert group.closed
            assert not (group.named and group.waiting)
            assert all(member.reward is not None for member in group.scored)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_life = Life.TestCase
