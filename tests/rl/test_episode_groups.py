"""Groups of episodes that come as a whole: their rewards, their turns, and what a restart makes of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from rl.fakes import FakeLearner, trajectories
from rl.service_rig import CHECKPOINTING, SETTINGS, World, settle, until, world

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.store import JournalFile


def episodes(name: str, *turns: int, scorer: str = "environment") -> list[Trajectory]:
    """Episodes of one group with so many turns; each turn continues the one before it."""
    made = []
    for number, count in enumerate(turns):
        prompt: tuple[int, ...] = (1, 2)
        for turn in range(count):
            one = trajectories(f"{name}-{number}-{turn}", BASE_ADAPTER, 1)[0]
            collection = CollectionSpec(scorer, group_id=name, episode_id=f"{name}-{number}", turn=turn)
            made.append(replace(one, group_id=name, group_size=0, prompt_ids=prompt, collection=collection))
            prompt += (*one.completion_ids, 9)
    return made


async def test_a_group_of_episodes_is_complete_at_once_and_trained_on_as_episodes() -> None:
    async with world() as one:
        await one.service.pause()
        rewards = {"g-0": 1.0, "g-1": 0.0}
        assert await one.service.trajectories.collect_episodes(episodes("g", 2, 1), rewards) == ""
        status = one.service.status()
        assert (status.groups_ready, status.groups_open, status.trajectories_waiting) == (1, 0, 0)
        assert status.turns == {"first": 2, "continued": 1}
        assert (await one.service.update()).status == "published"
        (batch,) = one.learner.batches
        assert sorted(sum(sample.loss_weights) for sample in batch.samples) == [2, 4]
        assert batch.metrics["reward_mean"] == 0.5


@pytest.mark.parametrize("scored", [True, False])
async def test_after_a_restart_the_group_waits_again_with_its_rewards(tmp_path: Path, scored: bool) -> None:
    def started() -> World:
        one = World(SETTINGS, None, CHECKPOINTING, Journal(JournalFile(tmp_path / "journal")), FakeLearner())
        one.scorers.rewards = lambda turn: float("g-0" in turn.trajectory_id)
        return one

    scorer, rewards = ("environment", {"g-0": 1.0, "g-1": 0.0}) if scored else ("exact", {})
    first = started()
    await first.service.start_adapter("main")
    await first.service.pause()
    if not scored:
        first.scorers.gate = asyncio.Event()  # the process ends before the scorer does
    await first.service.trajectories.collect_episodes(episodes("g", 2, 1, scorer=scorer), rewards)
    await first.service.close()
    again = started()
    await again.service.start_adapter("main")
    await again.service.pause()
    await until(lambda: again.service.status().groups_ready == 1)
    await settle()
    status = again.service.status()
    assert (status.groups_open, status.turns) == (0, {"first": 2, "continued": 1})
    assert (await again.service.update()).status == "published"
    again.service.check_integrity()
    await again.service.close()
