"""Groups that several requests fill: when they are closed, what their members are, and which rewards they get."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from configs import TRAINING, changed
from rl.fakes import FakeScorers, trajectories

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownTrajectoryError
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.groups import Groups
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Closed, EpisodeReward, Feedback, TokenRewards
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState, group_name

REF = AdapterRef("math", 1)


class World:
    """An intake, and requests that name groups and episodes."""

    def __init__(self, size: int = 100, **settings: object) -> None:
        self.ended: list[TrajectoryGroup] = []
        self.buffer = TrajectoryBuffer(size, self.ended.append)
        self.scorers = FakeScorers(lambda trajectory: float(len(trajectory.completion_ids)))
        config = changed(TRAINING, **settings)
        self.events: list[str] = []
        self.groups = Groups(
            self.buffer, self.scorers, config, Journal(), lambda _: None, lambda kind, **_: self.events.append(kind)
        )
        self.requests = 0

    def add(self, n: int = 1, adapter: AdapterRef = REF, refused: DropReason | None = None, **spec: object):
        """Adds the answers of one request. Returns its last trajectory, and what became of them."""
        self.requests += 1
        collection = CollectionSpec(**spec)
        name = f"r{self.requests}"
        made = [
            replace(one, collection=collection, group_id=group_name(collection) or name)
            for one in trajectories(name, adapter, n)
        ]
        added = self.groups.add(adapter.name, made, refused)
        self.buffer.check_integrity()
        return made[-1], added

    def group(self, group_id: str = "g") -> TrajectoryGroup:
        group = self.buffer.find(group_id)
        assert group is not None
        return group

    @property
    def rewards(self) -> list[float | None]:
        return [member.reward for member in self.group().members]

    def ready(self) -> int:
        return len(self.buffer.ready(REF.name))


def reasons(group: TrajectoryGroup) -> list[str]:
    return [member.reason or member.state for member in group.members]


async def test_a_group_is_complete_when_as_many_answers_have_rewards_as_it_is_to_have() -> None:
    world = World()
    first, _ = world.add(group_id="g", group_size=2)
    second, _ = world.add(group_id="g", group_size=2)
    assert not world.group().closed
    world.groups.apply(Feedback(first.trajectory_id, 1.0))
    assert world.ready() == 0
    world.groups.apply(Feedback(second.trajectory_id, 0.0))
    assert world.ready() == 1
    assert world.rewards == [1.0, 0.0]
    assert world.events == ["collected", "collected", "scored", "closed", "scored"]


async def test_more_may_come_than_are_wanted_and_the_late_ones_are_dropped() -> None:
    world = World()
    made = [world.add(group_id="g", group_size=2)[0] for _ in range(3)]
    for one in made[1:]:
        world.groups.apply(Feedback(one.trajectory_id, 1.0))
    assert reasons(world.group()) == [DropReason.UNREWARDED, TrajectoryState.SCORED, TrajectoryState.SCORED]
    late, added = world.add(group_id="g", group_size=2)
    assert added.dropped is DropReason.CLOSED
    with pytest.raises(ConflictError, match="closed"):
        world.groups.apply(Feedback(late.trajectory_id, 1.0))
    for group in world.buffer.take(REF.name):
        world.buffer.finish(group)
    world.buffer.check_integrity()
    assert world.add(group_id="g", group_size=2)[1].dropped is DropReason.CLOSED, "it is remembered"


async def test_episodes_with_a_scorer_wait_until_their_group_is_closed() -> None:
    world = World()
    for episode in "ab":
        for turn in range(2):
            world.add(group_id="g", group_size=2, scorer="exact", episode_id=episode, turn=turn)
    await asyncio.sleep(0.01)
    assert world.rewards == [None, None]
    world.groups.apply(Closed("g"))
    await asyncio.sleep(0.01)
    assert world.rewards == [2.0, 2.0]


async def test_an_episode_is_one_member_and_ends_with_its_reward() -> None:
    world = World()
    for episode in "ab":
        for turn in range(3):
            world.add(group_id="g", group_size=2, episode_id=episode, turn=turn)
    assert [len(member.turns) for member in world.group().members] == [3, 3]
    world.groups.apply(EpisodeReward("a", "g", 1.0))
    assert world.ready() == 0
    world.groups.apply(EpisodeReward("b", "g", 0.5))
    assert world.ready() == 1
    (taken,) = world.buffer.take(REF.name)
    world.buffer.finish(taken)
    world.buffer.check_integrity()
    assert world.buffer.trained[REF.name] == 6
    with pytest.raises(ConflictError):
        world.groups.apply(EpisodeReward("a", "g", 1.0))


async def test_rewards_of_turns_and_tokens_add_to_that_of_the_episode() -> None:
    world = World()
    first, _ = world.add(group_id="g", group_size=1, episode_id="a")
    second, _ = world.add(group_id="g", group_size=1, episode_id="a")
    world.groups.apply(Feedback(first.trajectory_id, 0.25))
    world.groups.apply(TokenRewards(second.trajectory_id, (0.5, 0.0)))
    assert world.ready() == 0, "neither ends the episode"
    world.groups.apply(EpisodeReward("a", "g", 1.0))
    assert world.rewards == [1.75]
    (member,) = world.group().members
    assert member.token_rewards == [(0.0, 0.25), (0.5, 0.0)]


async def test_a_turn_that_comes_again_replaces_the_earlier_one() -> None:
    world = World()
    world.add(episode_id="a", turn=0)
    lost, _ = world.add(episode_id="a", turn=1)
    world.groups.apply(Feedback(lost.trajectory_id, 9.0))
    again, _ = world.add(episode_id="a", turn=1)
    before, _ = world.add(episode_id="a", turn=4)
    between, _ = world.add(episode_id="a", turn=2)
    (member,) = world.group("episode-a").members
    assert member.turns[1:] == [again, between, before]
    assert member.reward is None
    assert world.buffer.drops[REF.name] == {DropReason.REPLACED: 1}
    with pytest.raises(UnknownTrajectoryError):
        world.groups.apply(Feedback(lost.trajectory_id, 1.0))


async def test_turns_are_counted_by_whether_they_continue_the_tokens_of_an_earlier_one() -> None:
    world = World()
    world.add(episode_id="a")
    (first,) = world.group("episode-a").members[0].turns
    follow = replace(
        first, trajectory_id="x", prompt_ids=(*first.prompt_ids, *first.completion_ids, 7), completion_ids=(8, 9)
    )
    assert not world.groups.add(REF.name, [follow], None).apart
    assert world.add(episode_id="a")[1].apart
    assert world.groups.turns[REF.name] == {"first": 1, "continued": 1, "apart": 1}


async def test_what_a_request_says_of_its_group_must_agree_with_the_first() -> None:
    world = World()
    first = CollectionSpec("exact", group_id="g", group_size=2)
    world.groups.check(first, "math")
    world.add(group_id="g", group_size=2, scorer="exact")
    world.groups.check(first, "math")
    for other, param in (
        (replace(first, group_size=3), "group_size"),
        (replace(first, scorer=None), "scoring_function"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            world.groups.check(other, "math")
        assert refused.value.param == param
    with pytest.raises(ConflictError, match="trains another adapter than other"):
        world.groups.check(first, "other")
    world.groups.apply(Closed("g"))
    with pytest.raises(ConflictError, match="closed"):
        world.groups.check(first, "math")


async def test_one_stale_turn_drops_its_episode_and_no_other() -> None:
    world = World()
    old, new = AdapterRef("math", 1), AdapterRef("math", 2)
    world.add(group_id="g", episode_id="a", adapter=old)
    world.add(group_id="g", episode_id="a", adapter=new)
    world.add(group_id="g", episode_id="b", adapter=new)
    world.buffer.sweep("math", lambda version: DropReason.STALE if version == old else None)
    world.buffer.check_integrity()
    assert reasons(world.group()) == [DropReason.STALE, TrajectoryState.WAITING]
    world.add(group_id="g", episode_id="a", adapter=new)
    assert world.buffer.drops["math"] == {DropReason.STALE: 3}, "a later turn of it is dropped too"


async def test_an_open_group_that_nobody_rewards_ends_after_the_time_limit_of_feedback() -> None:
    world = World(feedback_timeout_s=0.01)
    first, _ = world.add(group_id="g")
    world.add(group_id="g")
    world.groups.apply(Feedback(first.trajectory_id, 1.0))
    await asyncio.sleep(0.05)
    assert reasons(world.group()) == [TrajectoryState.SCORED, DropReason.TIMEOUT]
    assert world.ready() == 1
