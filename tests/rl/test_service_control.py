"""Training under control: start, pause, rollback, tags, events, the log and the end."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from configs import changed
from rl.fakes import policy
from rl.service_rig import GIVEN, SETTINGS, settle, world

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.config import CheckpointingConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import (
    ConflictError,
    InvalidRequestError,
    StepFailedError,
    UnknownModelError,
)
from mlx_parallm.rl.status import TrainingEvent


async def test_a_name_that_means_another_version_by_now_begins_again_with_it() -> None:
    async with world() as one:
        await one.service.update(given=GIVEN, checkpoint_name="good")
        await one.service.update(given=GIVEN)
        one.publisher.names["main"] = elsewhere = AdapterRef("main", 40)
        one.publisher.versions[elsewhere] = 40.0
        with pytest.raises(ConflictError, match="main@40"):
            await one.service.start()
        one.publisher.saved.append((CheckpointCard("checkpoint-50", elsewhere, 50, "", 0), policy(40.0, 50)))
        assert (await one.service.start()).step == 50
        assert one.learner.policies["main"] == (40.0, 50)
        with pytest.raises(ConflictError):
            await one.service.trajectories.check(CollectionSpec("exact"), AdapterRef("main", 1), EVERYTHING)
        await one.service.trajectories.check(CollectionSpec("exact"), elsewhere, EVERYTHING)


async def test_an_update_that_was_asked_for_is_finished_though_nobody_waits() -> None:
    async with world() as one:
        one.learner.hold = asyncio.Event()
        asked = asyncio.create_task(one.service.update(given=GIVEN, checkpoint_name="mine"))
        await settle()
        asked.cancel()
        await settle()
        assert asked.cancelled()
        assert one.service.status().state == "updating"
        one.learner.hold.set()
        await settle()
        assert one.service.status().current == AdapterRef("main", 1)
        assert one.service.status().checkpoints == ("checkpoint-1", "mine")


async def test_a_tag_that_cannot_be_is_refused_before_anything_is_learnt() -> None:
    async with world() as one:
        for tag in ("latest", "../x", "checkpoint-4"):
            with pytest.raises(InvalidRequestError):
                await one.service.update(given=GIVEN, checkpoint_name=tag)
        with pytest.raises(UnknownModelError):
            await one.service.update("math", given=GIVEN)
        assert one.learner.batches == []


async def test_whoever_asked_is_told_what_failed() -> None:
    async with world() as one:
        one.learner.error = StepFailedError("out of memory")
        with pytest.raises(StepFailedError, match="out of memory"):
            await one.service.update(given=GIVEN)
        one.learner.error = None
        assert (await one.service.update(given=GIVEN)).status == "published"


async def test_everything_is_told_in_order() -> None:
    async with world(changed(SETTINGS, update_frequency=2), checkpointing=CheckpointingConfig(interval=1)) as one:
        async with aclosing(one.service.events()) as events:
            await one.request()
            await settle()
            one.scorers.rewards = lambda trajectory: 1.0
            await one.request(AdapterRef("main", 1))
            await settle()
            await one.service.pause()
            await one.service.resume()
            await one.service.rollback()
            await one.service.start("tone")
            await one.service.close()
            seen: list[TrainingEvent] = [event async for event in events]
        assert [event.kind for event in seen] == [
            "collected", "scored", "updating", "update", "checkpoint",
            "collected", "scored", "dropped",
            "paused", "resumed", "rollback", "checkpoint", "started",
        ]  # fmt: skip
        assert seen[2].data["groups"] == [seen[0].data["group_id"]]
        assert [event.data["version"] for event in seen if event.kind == "collected"] == ["base@0", "main@1"]
        assert seen[3].data["version"] == "main@1"
        assert seen[7].data["reasons"] == {"zero_variance": 2}
        assert {event.data["adapter"] for event in seen[:-1]} == {"main"}
        assert json.dumps([dict(event.data) for event in seen])


async def test_close_gives_up_what_is_under_way() -> None:
    async with world(changed(SETTINGS, update_frequency=2)) as one:
        one.learner.hold = asyncio.Event()
        one.scorers.gate = asyncio.Event()
        await one.request()
        updating = asyncio.create_task(one.service.update(given=GIVEN))
        await settle()
        await one.service.close()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert one.publisher.flips == []
        assert len(asyncio.all_tasks()) == 1


# ---- while the machine should not train --------------------------------------------------------------


def pauses(events: list[TrainingEvent]) -> list[tuple[str, object]]:
    return [(event.kind, event.data.get("reason")) for event in events if event.kind in ("paused", "resumed")]


async def test_while_it_is_held_nothing_is_updated_by_itself_and_then_what_has_waited_is() -> None:
    async with world() as one:
        events: list[TrainingEvent] = []
        one.service.add_sink(events.append)
        one.service.hold("the machine runs on battery")
        for _ in range(2):
            await one.request()
        await settle()
        status = one.service.status()
        assert (status.state, status.pause_reason) == ("paused", "the machine runs on battery")
        assert one.learner.batches == []
        assert one.service.loop().pause_reason, "so that the server's own rollouts wait too"
        one.service.hold("")
        await settle()
        assert len(one.learner.batches) == 1
        assert pauses(events) == [("paused", "the machine runs on battery"), ("resumed", None)]


async def test_the_end_of_a_hold_does_not_end_a_pause_and_resuming_does_not_end_a_hold() -> None:
    async with world() as one:
        await one.service.pause()
        one.service.hold("battery")
        assert one.service.status().pause_reason == "asked"
        one.service.hold("")
        assert one.service.status().state == "paused"
        one.service.hold("battery")
        assert (await one.service.resume()).pause_reason == "battery"
        one.service.hold("")
        assert one.service.status().state != "paused"
