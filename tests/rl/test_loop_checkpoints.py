"""Checkpoints of an adapter in training, and the way back to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from configs import changed, limited
from rl.fakes import policy, trajectories
from rl.rig import NAME, SETTINGS, opened, ref, running
from saves import manager, weights

from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.config import CheckpointingConfig
from mlx_parallm.errors import (
    AdapterUnavailableError,
    ConflictError,
    StorageError,
    UnknownModelError,
)
from mlx_parallm.rl.checkpoints import PolicyCheckpoints
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState
from mlx_parallm.rl.updates.adapter_training import CHANGE, REWARD_KEY
from mlx_parallm.train.policy import PolicySnapshot


async def test_every_few_updates_are_saved_and_the_best_version_before_them() -> None:
    rig = await opened(settings=limited(SETTINGS, reward=None), checkpointing=CheckpointingConfig(interval=2))
    for mean in (0.25, 0.5, 0.4, 0.3):
        await rig.updated_at(mean)
    # the running mean is best at the second batch, which version 1 drew, and again at the third
    assert rig.saves == [
        ("checkpoint-1", ref(1), ("best",)),
        ("checkpoint-2", ref(2), ()),
        ("checkpoint-2", ref(2), ("best",)),
        ("checkpoint-4", ref(4), ()),
    ]
    for _ in range(2):
        await rig.updated_at(0.1)
    assert rig.saves[4:] == [("checkpoint-6", ref(6), ())], "the best one is saved once"
    assert rig.publisher.saved[0][0].metrics["reward_running_mean"] == pytest.approx(0.25 + 0.25 * (1 - 0.8 * 0.9**6))
    two_updates = ["update", "update", "checkpoint", "checkpoint"]
    assert rig.kinds == [*two_updates, *two_updates, "update", "update", "checkpoint"]


async def test_a_checkpoint_on_request_holds_the_policy_and_its_optimizer() -> None:
    rig = await opened()
    await rig.updated(1.0, 0.0)
    card = await rig.loop.save(None, ["good"], {"mine": 2.0})
    assert (card.name, card.adapter, card.tags) == ("checkpoint-1", ref(1), ("good",))
    assert card.metrics == {"mine": 2.0, **rig.training.rewards.to_metrics(), REWARD_KEY: 0.0, CHANGE: 2.0}
    assert rig.publisher.saved[-1][1] == policy(1.0, 1)
    again = await rig.loop.save(70, [], {})
    assert again.name == "checkpoint-70"
    assert again.metrics["reward_mean"] == 0.5, "without metrics of the request, those of the last update"
    await rig.updated(1.0, 0.0)
    with pytest.raises(ConflictError):
        await rig.loop.save(70, [], {})
    rig.check()


async def test_before_the_first_update_step_0_is_saved_and_restores() -> None:
    rig = await opened()
    card = await rig.loop.save(None, ["start"], {})
    assert (card.name, rig.publisher.saved[-1][1]) == ("checkpoint-0", policy(0.0, 0))
    assert rig.publisher.live(NAME) is None, "requests still get the base model"
    assert rig.training.versions.staleness(card.adapter) == 0, "requests that name the checkpoint can be trained on"
    assert (await rig.loop.save(None, [], {})).name == "checkpoint-0", "the same content is not saved twice"
    await rig.updated(1.0, 0.0)
    await rig.loop.roll_back("start")
    assert rig.learner.policies[NAME] == (0.0, 0)
    rig.check()


async def test_a_checkpoint_that_cannot_be_saved_costs_only_itself() -> None:
    rig = await opened(checkpointing=CheckpointingConfig(interval=1))
    rig.publisher.save_error = StorageError("the disk is full")
    report = await rig.updated(1.0, 0.0)
    assert (report.status, report.checkpoint) == ("published", None)
    assert rig.loop.status().detail["checkpoint_failures"] == 1
    rig.check()


# ---- rollback -----------------------------------------------------------------------------------


async def test_training_goes_back_to_the_best_version_when_rewards_fall() -> None:
    rig = await opened(
        settings=changed(limited(SETTINGS, reward=0.3), max_staleness=9), checkpointing=CheckpointingConfig(interval=3)
    )
    for mean in (0.5, 0.6, 0.9):  # drawn by the base, versions 1 and 2
        await rig.updated_at(mean)
    assert rig.loop.status().best == ref(2)
    assert +rig.publisher.kept == {ref(2): 1}, "and no earlier one"
    assert rig.publisher.names[NAME] == ref(3)
    foreign, ours = (
        TrajectoryGroup(NAME, trajectories(name, by)) for name, by in (("foreign", ref(3)), ("ours", ref(2)))
    )
    rig.buffer.add(foreign)
    rig.buffer.add(ours)
    report = await rig.updated_at(0.0)
    assert (report.status, report.adapter) == ("skipped", ref(2))
    assert "rolled_back" in rig.loop.status().skips
    assert rig.publisher.names[NAME] == ref(2) == rig.training.versions.latest
    assert rig.learner.policies[NAME] == (2.0, 2)
    assert [member.reason for member in foreign.members] == [DropReason.UNKNOWN_VERSION] * 2
    assert [member.state for member in ours.members] == [TrajectoryState.WAITING] * 2
    assert rig.training.rewards.trend.mean is None
    assert rig.kinds.count("rollback") == 1
    rollback = rig.kinds.index("rollback")
    assert rig.events[rollback][1]["version"] == "math@2"
    assert rig.saves[-1][1:] == (ref(2), ("best",))
    assert rig.publisher.latest == "checkpoint-2", "a restart begins with it"
    rig.check()
    report = await rig.updated(0.1, -0.1)
    assert (report.status, report.step) == ("published", 3), "low rewards are a new beginning, not another fall"
    assert rig.publisher.versions[report.adapter] == 3.0
    rig.check()


async def test_rollback_on_request_to_the_best_or_a_checkpoint() -> None:
    rig = await opened()
    with pytest.raises(ConflictError, match="best"):
        await rig.loop.roll_back(None)
    await rig.updated(1.0, 0.0, tag="first")
    await rig.updated(1.2, 0.8)
    await rig.updated(0.5, 0.0)
    with pytest.raises(UnknownModelError):
        await rig.loop.roll_back("nothing")
    assert rig.publisher.names[NAME] == ref(3)
    await rig.loop.roll_back("first")
    assert rig.publisher.names[NAME] == ref(1)
    assert rig.learner.policies[NAME] == (1.0, 1)
    assert rig.publisher.latest == "checkpoint-1"
    rig.check()
    await rig.updated(0.5, 0.0, tag="second")
    assert rig.publisher.latest == "checkpoint-2"
    await rig.loop.roll_back("checkpoint-1")
    assert rig.training.versions.last(9) == ("base@0", "math@1")
    assert rig.publisher.latest == "checkpoint-1"
    rig.check()


async def test_a_rollback_that_fails_leaves_everything_as_it_was() -> None:
    rig = await opened()
    await rig.updated(1.0, 0.0, tag="first")
    await rig.updated(1.0, 0.0)
    rig.publisher.flip_error = AdapterUnavailableError("gone")
    with pytest.raises(AdapterUnavailableError):
        await rig.loop.roll_back("first")
    assert rig.publisher.names[NAME] == ref(2) == rig.training.versions.latest
    assert "rollback" not in rig.kinds
    rig.check()


# ---- nothing that was learnt is lost ------------------------------------------------------------


async def test_closing_saves_what_no_checkpoint_has_and_nothing_twice() -> None:
    rig = await opened()
    await rig.loop.close()
    assert rig.saves == [], "nothing was learnt"
    await rig.updated(1.0, 0.0)
    await rig.updated(1.0, 0.0, publish=False)
    await rig.loop.close()
    assert rig.saves[-1] == ("checkpoint-2", ref(2), ()), "an update that was not published is saved too"
    count = len(rig.saves)
    await rig.loop.close()
    assert len(rig.saves) == count


@pytest.mark.parametrize("is_saved", [False, True])
async def test_what_closing_saves_is_live_so_that_the_next_start_continues_from_it(is_saved: bool) -> None:
    rig = await opened()
    await rig.updated(1.0, 0.0)
    await rig.updated(1.0, 0.0, publish=False)
    if is_saved:
        await rig.loop.save(None, [], {})
    await rig.loop.close()
    rig.restart()
    await rig.loop.open()
    assert (rig.learner.policies[NAME], rig.loop.status().step) == ((2.0, 2), 2)
    rig.check()


async def test_closing_on_a_full_disk_is_an_error() -> None:
    rig = await opened()
    await rig.updated(1.0, 0.0)
    rig.publisher.save_error = StorageError("the disk is full")
    with pytest.raises(StorageError):
        await rig.loop.close()


async def test_an_update_waits_for_its_checkpoint_only_so_long() -> None:
    rig = await opened(checkpointing=CheckpointingConfig(interval=1000, minutes=0.05 / 60))
    async with running(rig):
        await rig.updated(1.0, 0.0)
        assert rig.saves == []
        while not rig.saves:
            await asyncio.sleep(0.01)
    assert rig.saves == [("checkpoint-1", ref(1), ())]
    assert rig.training.checkpoints.unsaved.due_in is None


async def test_a_checkpoint_that_was_asked_for_is_saved_or_an_error() -> None:
    rig = await opened()
    assert (await rig.loop.update(None, tag="nothing")).checkpoint == "checkpoint-0"
    rig.publisher.save_error = StorageError("the disk is full")
    with pytest.raises(StorageError, match=r"the update ended as 'published', step 1, but the disk is full"):
        await rig.updated(1.0, 0.0, tag="good")
    assert rig.publisher.names[NAME] == ref(2), "it is live all the same"
    rig.publisher.save_error = None
    skipped = await rig.loop.update(None, tag="later")
    assert (skipped.status, skipped.checkpoint) == ("skipped", "checkpoint-1")
    assert rig.saves[-1] == ("checkpoint-1", ref(2), ("later",))
    rig.check()


async def test_the_card_of_a_saved_policy_names_its_step_or_the_next_one_that_is_free(tmp_path: Path) -> None:
    store = manager(tmp_path)
    checkpoints = PolicyCheckpoints(store, AdapterRegistry())
    optimizer = {"moment": np.ones(1)}
    first, other = (PolicySnapshot(weights(seed), optimizer, step=3) for seed in (1, 2))
    card = await checkpoints.save(ref(1), first, ["best"], {"kl": 0.5})
    assert (card.name, card.step, card.metrics) == ("checkpoint-3", 3, {"kl": 0.5})
    assert card == store.find(NAME, "best")
    after_a_rollback = await checkpoints.save(ref(2), other, [], {})
    assert (after_a_rollback.step, after_a_rollback.adapter) == (4, ref(2))
    with pytest.raises(ConflictError):
        await checkpoints.save(ref(2), other, [], {}, step=3)
