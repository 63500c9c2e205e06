"""What a lesson changes in the training of its adapter, and that it changes back."""

from __future__ import annotations

from pathlib import Path

from configs import changed
from rl.rig import SETTINGS, opened, running, settle
from rl.service_rig import until
from rl.test_recovery import Run

from mlx_parallm.core.requests import CollectionSpec, GenerationRequest, SamplingParams, StopParams
from mlx_parallm.extras.lessons.record import new_id
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.rl.updates.adapter_training import Pace

TAG = "before-lesson"


async def test_its_updates_are_of_its_own_size_and_learning_rate_until_it_ends() -> None:
    rig = await opened(settings=changed(SETTINGS, update_frequency=6))
    async with running(rig):
        card = await rig.loop.begin_lesson(Pace(2, 1e-3), TAG)
        assert card.tags == (TAG,)
        rig.drawn(1.0, 0.0)
        await settle()
        await rig.loop.end_lesson()
        rig.drawn(1.0, 0.0)
        await settle()
        assert [(len(batch.samples), batch.learning_rate) for batch in rig.learner.batches] == [(2, 1e-3)]
        rig.drawn(1.0, 0.0)
        rig.drawn(1.0, 0.0)
    assert [(len(batch.samples), batch.learning_rate) for batch in rig.learner.batches] == [(2, 1e-3), (6, None)]
    rig.check()


async def test_worse_rewards_than_before_it_are_no_fall() -> None:
    rig = await opened(settings=changed(SETTINGS, update_frequency=1000))
    for mean in (0.9, 0.9, 0.9):
        await rig.updated_at(mean)
    await rig.loop.begin_lesson(Pace(16, 1e-3), TAG)
    for mean in (0.1, 0.1, 0.1):
        assert (await rig.updated_at(mean)).status == "published"
    assert "rollback" not in rig.kinds


async def test_what_taught_nothing_before_it_counts_towards_none_of_its_updates() -> None:
    rig = await opened(settings=SETTINGS)
    async with running(rig):
        rig.drawn(1.0, 1.0)
        assert rig.loop.status().detail["trajectories_without_signal"] == 2
        await rig.loop.begin_lesson(Pace(2, 1e-3), TAG)
        assert rig.loop.status().detail["trajectories_without_signal"] == 0


async def test_its_updates_are_made_again_after_a_crash_with_its_learning_rate(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        await one.service.loop().begin_lesson(Pace(2, 1e-3), TAG)
        await one.request()
        await until(lambda: one.service.status().step == 1)
        assert [batch.learning_rate for batch in one.learner.batches] == [1e-3]
    async with run.process() as one:
        assert [batch.learning_rate for batch in one.learner.batches] == [1e-3]
        assert one.service.loop().per_update == 1000, "the lesson itself has ended"


async def test_what_is_left_of_one_that_ended_with_its_process_is_not_trained_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        await one.service.loop().begin_lesson(Pace(8, 1e-3), TAG)
        drawn = GenerationRequest(
            f"rollout-{new_id()}-0", ((1,),), SamplingParams(), StopParams(4), n=2, collection=CollectionSpec("exact")
        )
        left = [event async for event in one.generate(drawn)][-1].trajectory_ids
        others = await one.request()
        await until(lambda: {one.states()[one_id] for one_id in (*left, *others)} == {"scored"})
    for _ in range(2):  # the journal has it that they are dropped
        async with run.process() as one:
            await settle()
            status = one.service.status()
            assert (status.step, status.groups_ready) == (0, 1)
            assert {one.states()[one_id] for one_id in others} == {"scored"}
            fates = [await one.service.parts.journal.fate(one_id) for one_id in left]
            assert [fate.reason for fate in fates] == [DropReason.STOPPED] * 2
