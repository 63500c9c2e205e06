"""Groups, episodes and rewards of several API keys that use the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl.fakes import FakeEngine
from rl.service_rig import World
from rl.test_recovery import Run

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.requests import (
    CollectionSpec,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.errors import ConflictError, UnknownTrajectoryError

ANSWER = SequenceOutput(0, (5, 2), "a", finish_reason=FinishReason.STOP, sampling_logprobs=(-0.5, -0.1))
ONE, TWO, BOSS = Reader("one"), Reader("two"), Reader("boss", reads_all=True)


async def answer(world: World, key: str | None, prompt: int = 1, **named: object) -> str:
    """The id of the trajectory of a request of this key."""
    world.requests += 1
    spec = CollectionSpec(None, **named)  # type: ignore[arg-type]
    asked = GenerationRequest(
        f"{key}{world.requests}", ((prompt,),), SamplingParams(), StopParams(4), collection=spec, key=key
    )
    await world.service.trajectories.check(spec, BASE_ADAPTER, Reader(key or ""))
    events = world.service.trajectories.collect(
        asked, FakeEngine([ANSWER, RequestFinished(1, 2, 0, 0, 0, 1)]).generate(asked)
    )
    ((trajectory_id,),) = [event.trajectory_ids async for event in events if isinstance(event, RequestFinished)]
    return trajectory_id


def groups(world: World) -> dict[tuple[str, str], int]:
    """The members of each open group, by its owner and id."""
    return {group.key: len(group.members) for group in world.service.trajectories.buffer.of("main")}


async def test_two_programs_may_count_alike_and_a_restart_keeps_them_apart(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    step = {"group_id": "step-1", "group_size": 3}
    async with run.process() as one:
        for key, prompt in (("one", 1), ("one", 1), ("two", 9)):
            await answer(one, key, prompt, **step)
        assert groups(one) == {("one", "step-1"): 2, ("two", "step-1"): 1}
        await one.service.trajectories.close_group("step-1", TWO)
        with pytest.raises(ConflictError):
            await answer(one, "two", 9, **step)
    async with run.process() as one:
        assert groups(one) == {("one", "step-1"): 2}, "that of `two` was closed without a reward, and so dropped"
        await answer(one, "one", 1, **step)
        prompts = {
            member.trajectory.prompt_ids for member in one.service.trajectories.buffer.find("step-1", "one").members
        }  # type: ignore[union-attr]
        assert prompts == {(1,)}


async def test_a_key_rewards_and_closes_only_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        collected, people = one.service.trajectories, one.people
        mine = await answer(one, "one", episode_id="e", group_id="g")
        alone = await answer(one, "one")
        for refused in (
            collected.feedback(alone, 1.0, "", TWO),
            people.find(alone, TWO),
            collected.reward_tokens(mine, [1.0, 0.0], TWO),
            collected.reward_episode("e", "g", -100.0, TWO),
            collected.close_group("g", TWO),
        ):
            with pytest.raises(UnknownTrajectoryError):
                await refused
        assert set(one.states().values()) == {"waiting"}
        for allowed in (ONE, BOSS):
            await collected.feedback(alone, 0.5, "", allowed)
            await collected.reward_episode("e", "g", 0.25, allowed)
        assert set(one.states().values()) == {"scored"}
        await collected.close_group("g", BOSS)
        with pytest.raises(UnknownTrajectoryError):
            await collected.feedback((await answer(one, "one")) + "x", 1.0, "", ONE)
