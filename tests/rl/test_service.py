"""Training as its clients see it: from a finished request to the next version, for several adapters at once."""

from __future__ import annotations

import asyncio

import pytest
from configs import changed
from rl.service_rig import GIVEN, SETTINGS, settle, world
from sample_parts import advantage as advantage_of

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import (
    ConflictError,
    InvalidRequestError,
    UnknownModelError,
)


@pytest.mark.parametrize(("score", "advantage"), [(1.0, 0.5), (0.0, -0.5), (-1.0, -1.5)])
async def test_one_thumb_of_a_group_is_an_update(score: float, advantage: float) -> None:
    """The first one that ever comes, and only that: nobody judges the other sample, however long it waits."""
    async with world(changed(SETTINGS, update_frequency=1, group_timeout_s=0.001)) as one:
        from_feedback, silent = await one.request(scorer=None)
        await asyncio.sleep(0.01)
        await one.service.trajectories.feedback(from_feedback, score)
        await settle()
        assert [advantage_of(sample) for sample in one.learner.batches[0].samples] == [advantage]
        assert one.service.status().current == AdapterRef("main", 1)
        assert one.states() == {from_feedback: "trained", silent: "waiting"}
        await one.service.trajectories.feedback(silent, 1.0)
        await settle()
        assert one.states() == {from_feedback: "trained", silent: "trained"}
        with pytest.raises(ConflictError, match="taken for training"):
            await one.service.trajectories.feedback(from_feedback, 0.0)


async def test_a_thumb_survives_the_failure_of_the_scorer() -> None:
    async with world(changed(SETTINGS, update_frequency=1)) as one:
        one.scorers.rewards = None
        one.scorers.gate = asyncio.Event()
        from_feedback, other = await one.request()
        await one.service.trajectories.feedback(from_feedback, 1.0)
        await settle()
        assert one.learner.batches == []
        one.scorers.gate.set()
        await settle()
        assert one.states() == {from_feedback: "trained", other: "scoring_failed"}


async def test_several_adapters_learn_each_from_what_it_drew() -> None:
    async with world(changed(SETTINGS, update_frequency=2)) as one:
        assert (await one.service.start("tone")).current == AdapterRef("tone", 1)
        assert one.service.status("tone").trained == ("main", "tone")
        await one.request(AdapterRef("tone", 1))
        await settle()
        assert one.publisher.flips == [AdapterRef("tone", 1), AdapterRef("tone", 2)]
        await one.request(BASE_ADAPTER)
        await settle()
        assert one.publisher.flips[2:] == [AdapterRef("main", 1)]
        assert one.learner.policies == {"main": (1.0, 1), "tone": (1.0, 1)}
        assert one.service.status("tone").trajectories_collected == 2
        with pytest.raises(UnknownModelError):
            one.service.status("math")
        with pytest.raises(InvalidRequestError):
            await one.service.start("../tone")


async def test_only_what_a_trained_adapter_draws_may_be_collected() -> None:
    async with world(changed(SETTINGS, update_frequency=2)) as one:
        await one.service.trajectories.check(CollectionSpec("exact"), BASE_ADAPTER, EVERYTHING)
        with pytest.raises(InvalidRequestError):
            await one.service.trajectories.check(CollectionSpec("unknown"), BASE_ADAPTER, EVERYTHING)
        for stranger in (AdapterRef("math", 1), AdapterRef("main", 7)):
            with pytest.raises(ConflictError, match=str(stranger)):
                await one.service.trajectories.check(CollectionSpec("exact"), stranger, EVERYTHING)
        await one.request()
        await settle()
        await one.service.trajectories.check(CollectionSpec("exact"), AdapterRef("main", 1), EVERYTHING)
        foreign = await one.request(AdapterRef("main", 7))
        await settle()
        assert {one.states()[trajectory] for trajectory in foreign} == {"unknown_version"}
        assert len(one.learner.batches) == 1


async def test_a_request_is_told_that_what_it_drew_is_too_old_to_be_trained_on() -> None:
    async with world(changed(SETTINGS, max_staleness=1)) as one:
        events = one.service.events()
        for _ in range(3):
            await one.service.update(given=GIVEN)
        assert (await one.finished(AdapterRef("main", 2))).trajectory_warning == ""
        stale = await one.finished(AdapterRef("main", 1))
        assert stale.trajectory_warning == (
            "main@1 is 2 versions behind main@3, and max_staleness is 1: these trajectories will not be trained on."
        )
        assert {one.states()[trajectory] for trajectory in stale.trajectory_ids} == {"stale"}
        foreign = await one.finished(AdapterRef("main", 7))
        assert foreign.trajectory_warning.startswith("main@7 is no version that training continues from")
        await one.service.close()
        assert [event.data["reasons"] async for event in events if event.kind == "dropped"] == [
            {"stale": 2},
            {"unknown_version": 2},
        ]


async def test_a_request_is_told_that_the_buffer_cannot_hold_what_it_drew() -> None:
    async with world(changed(SETTINGS, trajectory_buffer_size=1)) as one:
        told = (await one.finished(BASE_ADAPTER)).trajectory_warning
        assert told.startswith("There is no room for them in the buffer of 1 trajectories")
