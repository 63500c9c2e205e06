"""Groups that requests name, under any order of turns, rewards, updates and ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from configs import TRAINING
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rl.fakes import FakeScorers, groups_of, trajectories

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.groups import Groups
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Closed, EpisodeReward, Feedback, TokenRewards
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState, group_name

SIZE = 12
GROUPS, EPISODES = ("", "g", "h"), ("", "a", "b")


class OpenGroups(RuleBasedStateMachine):
    """Turns of two versions come in any order. Each trajectory ends once, trained or dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: Counter[str] = Counter()
        self.buffer = TrajectoryBuffer(SIZE, self.ended)
        self.groups = Groups(self.buffer, FakeScorers(), TRAINING, Journal(), lambda _: None, lambda kind, **_: None)
        self.made: list[str] = []
        self.taken: list[TrajectoryGroup] = []

    def ended(self, group: TrajectoryGroup) -> None:
        assert group.closed
        self.ends.update(turn.trajectory_id for member in group.members for turn in member.turns)

    @rule(
        group=st.sampled_from(GROUPS),
        episode=st.sampled_from(EPISODES),
        turn=st.none() | st.integers(0, 2),
        size=st.none() | st.integers(1, 3),
        version=st.integers(1, 2),
    )
    def add(self, group: str, episode: str, turn: int | None, size: int | None, version: int) -> None:
        spec = CollectionSpec(group_id=group, group_size=size, episode_id=episode, turn=turn)
        name = f"r{len(self.made)}"
        (one,) = trajectories(name, AdapterRef("math", version), 1)
        one = replace(one, collection=spec, group_id=group_name(spec) or name)
        self.made.append(one.trajectory_id)
        known = self.buffer.find(one.group_id)
        was_open = known is None or not known.closed
        added = self.groups.add("math", [one], None)
        assert was_open or not group_name(spec) or added.dropped is DropReason.CLOSED

    @rule(group=st.sampled_from(GROUPS), episode=st.sampled_from(EPISODES[1:]), score=st.floats(-1, 1))
    def reward_episode(self, group: str, episode: str, score: float) -> None:
        found = self.buffer.find(group or f"episode-{episode}")
        member = None if found is None else found.episode(episode)
        can = member is not None and member.is_open
        try:
            self.groups.apply(EpisodeReward(episode, group, score))
        except (ConflictError, UnknownTrajectoryError):
            assert not can
        else:
            assert can
            assert member is not None
            assert member.own_reward == score

    @precondition(lambda self: self.made)
    @rule(data=st.data(), score=st.floats(-1, 1), tokens=st.booleans())
    def feedback(self, data: st.DataObject, score: float, tokens: bool) -> None:
        name = data.draw(st.sampled_from(self.made))
        try:
            if tokens:
                self.groups.apply(TokenRewards(name, (score, 0.0)))
            else:
                self.groups.apply(Feedback(name, score))
        except (ConflictError, UnknownTrajectoryError):
            pass

    @rule(group=st.sampled_from(["g", "h", "episode-a", "episode-b"]))
    def close(self, group: str) -> None:
        try:
            closed = self.groups.apply(Closed(group))
        except (ConflictError, UnknownTrajectoryError):
            assert self.buffer.find(group) is None
        else:
            assert closed.closed
            assert not closed.waiting

    @rule(group=st.sampled_from(["g", "h", "episode-a"]))
    def expire(self, group: str) -> None:
        groups_of(self.buffer).expire(group)

    @rule()
    def take(self) -> None:
        self.taken += self.buffer.take("math")

    @precondition(lambda self: self.taken)
    @rule(held=st.booleans())
    def end(self, held: bool) -> None:
        self.buffer.finish(self.taken.pop(), DropReason.HELD if held else None)

    @rule()
    def sweep(self) -> None:
        self.buffer.sweep("math", lambda version: DropReason.STALE if version.version < 2 else None)

    @invariant()
    def books_agree(self) -> None:
        self.buffer.check_integrity()
        assert self.buffer.collected["math"] == len(self.made)
        assert all(count == 1 for count in self.ends.values())
        for group in self.buffer.ready("math"):
            assert group.closed
            assert TrajectoryState.WAITING not in {member.state for member in group.members} or not group.named
            assert all(member.reward is not None for member in group.scored)


OpenGroups.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_open_groups = OpenGroups.TestCase
