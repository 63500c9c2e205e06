"""What may still be used, and what is not, when something was forgotten; and how policies began that are rebuilt."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from extras.forgetting.forgetting_rig import (
    ended,
    equal,
    forgetting_of,
    give,
    policy,
    run,
    teach,
    training_of,
    trajectories,
)

from mlx_parallm.app.build import Served
from mlx_parallm.core.adapters import INCUMBENT
from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.core.trajectories import GivenTrajectory, Trajectory
from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec

RARELY = {"checkpointing__interval": 4}
ALWAYS = {"checkpointing__interval": 1}


def of_bob(one: Trajectory) -> bool:
    return one.owner == "bob"


async def forget(served: Served, from_scratch: bool = False) -> None:
    await forgetting_of(served).begin(ForgetSpec(key="bob", from_scratch=from_scratch))
    card = await ended(forgetting_of(served))
    assert card.state == "done", card


async def test_a_checkpoint_that_was_kept_is_no_best_one_and_training_does_not_go_back_to_it(tmp_path: Path) -> None:
    kept = {**ALWAYS, "checkpointing__remove_forgotten": "none"}
    async with run(tmp_path, **kept) as served:
        training = training_of(served)
        await teach(served, range(3))
        training.loop().training.rewards.trend.has_current = True
        await training.loop().training.set_best_to_latest()
        await training.save(None, None, ["good"], {})
        await training.parts.checkpoints.tag("default", "checkpoint-2", INCUMBENT)
        await teach(served, range(3, 4))
        await forget(served)
        tags = {tag: card for card in training.parts.checkpoints.cards("default") for tag in card.tags}
        assert ("good" in tags, INCUMBENT in tags) == (True, False)
    async with run(tmp_path, **kept) as served:
        training, learnt = training_of(served), await policy(served)
        rebuilt = training.status().current
        for to in ("good", "checkpoint-1"):
            with pytest.raises(ConflictError, match="has learnt from what was forgotten since"):
                await training.rollback(None, to)
        best = training.loop().training.checkpoints.best
        assert best is None or best.ref == rebuilt
        assert equal(await policy(served), learnt)
        await training.rollback(None, "latest")
        assert training.status().current == rebuilt


async def test_from_scratch_drops_what_waits_of_later_versions_with_the_opinions_of_it(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY) as served:
        collector = training_of(served).trajectories
        await teach(served, range(2))
        group = [
            replace(one, collection=replace(one.collection, scorer=None, episode_id=""))
            for one in trajectories(served, 5, "ann")
        ]
        await collector._add(group)
        await collector.feedback(group[0].trajectory_id, 1.0, "somebody")
        await forget(served, from_scratch=True)
        assert not [one for one, member in collector.buffer.newest(99) if member.is_open]
        training_of(served).check_integrity()


async def test_a_copy_of_a_version_for_restarts_is_removed_with_it(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(1))
        trained = served.adapters._registry.version(training_of(served).status().current)
        await served.adapters._keep_copy(trained)
        assert [*(tmp_path / "run" / "default").glob("version-*")]
        await forget(served)
        assert not [*(tmp_path / "run" / "default").glob("version-*")]


async def test_the_share_of_a_key_that_was_forgotten_is_none(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY) as served:
        ledger = training_of(served).ledger
        await teach(served, range(2))
        assert {each.key for each in ledger.keys("default", EVERYTHING)} == {"ann", "bob", "eve"}
        await forget(served)
        assert {each.key for each in ledger.keys("default", EVERYTHING)} == {"ann", "eve"}


def single(key: str, seed: int, reward: float) -> GivenTrajectory:
    """A sample that is compared with earlier rewards, since it has no group."""
    random = np.random.default_rng(seed)
    prompt, answer = (tuple(random.integers(3, 200, 4).tolist()) for _ in range(2))
    return GivenTrajectory(prompt, answer, reward, owner=key)


async def test_a_policy_that_began_with_a_loaded_adapter_knows_no_earlier_rewards(tmp_path: Path) -> None:
    async def learn(served: Served, with_bob: bool) -> None:
        training = training_of(served)
        for number in range(4):
            await training.update(given=[single("ann", number, 0.3 * number), *bobs(number, with_bob)])
        await served.adapters.load("default", str(tmp_path / "adapters" / "other"), True)
        await training.start()
        for number in range(4, 7):
            report = await training.update(given=[single("ann", number, 0.1 * number), *bobs(number, with_bob)])
        assert report.status == "published"

    def bobs(number: int, with_bob: bool) -> Sequence[GivenTrajectory]:
        return [single("bob", number + 50, 0.5)] if with_bob else []

    async with run(tmp_path, "maker", **ALWAYS) as served:
        await teach(served, range(1))
        (card,) = training_of(served).parts.checkpoints.cards("default")
        shutil.copytree(card.path, tmp_path / "adapters" / "other")
    (tmp_path / "adapters" / "other" / "manifest.json").unlink()
    elsewhere = {"checkpointing__interval": 2, "adapters__adapter_dir": tmp_path / "adapters"}
    async with run(tmp_path, "control", **elsewhere) as served:
        await learn(served, with_bob=False)
        control = await policy(served)
    async with run(tmp_path, **elsewhere) as served:
        await learn(served, with_bob=True)
        await forget(served)
        assert equal(await policy(served), control)
    async with run(tmp_path, **elsewhere) as served:
        assert equal(await policy(served), control)


async def test_answers_sampled_since_an_earlier_rebuild_stay_when_it_starts_from_scratch(tmp_path: Path) -> None:
    async with run(tmp_path, **RARELY) as served:
        await teach(served, range(2))
        await forgetting_of(served).begin(ForgetSpec(key="eve"))
        await ended(forgetting_of(served))
        rebuilt = training_of(served).status().current
        await give(served, 2, "ann")
        group = trajectories(served, 3, "ann")
        await give(served, 4, "bob")
        report = await training_of(served).update()
        assert report.status == "published"
        group = [replace(each, adapter=rebuilt) for each in group]
        rewards = {each.collection.episode_id: 0.1 * number for number, each in enumerate(group)}
        await training_of(served).trajectories.collect_episodes(group, rewards)
        spec = ForgetSpec(trajectory_ids=tuple(f"traj-4-bob-{number}" for number in range(4)), from_scratch=True)
        await forgetting_of(served).begin(spec)
        assert (await ended(forgetting_of(served))).state == "done"
        assert training_of(served).loop().waiting == 4, "the version that sampled them had not learnt from it"
