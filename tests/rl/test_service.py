"""Training as its clients see it: from a finished request to the next version, for several adapters at once."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rl.fakes import FakeEngine, FakeLearner, FakePublisher, FakeScorers, policy, trajectories

from mlx_parallm.core import (
    BASE_ADAPTER,
    AdapterRef,
    CheckpointCard,
    Collection,
    FinishReason,
    GenerationRequest,
    GivenTrajectory,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
    TrainingClient,
    TrainingEvent,
    Trajectory,
)
from mlx_parallm.errors import (
    ConflictError,
    InvalidRequestError,
    StepFailedError,
    UnknownModelError,
    UnknownTrajectoryError,
)
from mlx_parallm.rl.collecting import CollectingEngine
from mlx_parallm.rl.events import EventHub
from mlx_parallm.rl.service import TrainingParts, TrainingService
from mlx_parallm.rl.settings import LoopSettings, RewardScale
from mlx_parallm.rl.spill import SpillFile

SETTINGS = LoopSettings(update_frequency=4, scale_rewards=RewardScale.NONE, max_staleness=9)
GIVEN = (GivenTrajectory((1,), (2,), 1.0), GivenTrajectory((1,), (3,), 0.0))


def first_is_best(trajectory: Trajectory) -> float:
    return float(trajectory.trajectory_id.endswith("-0"))


class World:
    """A service over fakes; `engine` answers every request with two choices, and is collected from."""

    def __init__(self, settings: LoopSettings, spill: SpillFile | None) -> None:
        self.learner = FakeLearner()
        self.publisher = FakePublisher(self.learner)
        self.scorers = FakeScorers(first_is_best)
        parts = TrainingParts(self.learner, self.publisher, self.scorers, settings, spill=spill)
        self.service = TrainingService(parts, "main")
        choices = [
            SequenceOutput(index, (5, 2), "a", finish_reason=FinishReason.STOP, sampling_logprobs=(-0.5, -0.1))
            for index in range(2)
        ]
        self.engine = CollectingEngine(FakeEngine([*choices, RequestFinished(1, 4, 0, 0, 0, 1)]), self.service)
        self.requests = 0

    async def request(self, adapter: AdapterRef = BASE_ADAPTER, scorer: str | None = "exact") -> tuple[str, ...]:
        return (await self.finished(adapter, scorer)).trajectory_ids

    async def finished(self, adapter: AdapterRef, scorer: str | None = "exact") -> RequestFinished:
        self.requests += 1
        asked = GenerationRequest(
            f"r{self.requests}",
            ((1,),),
            SamplingParams(),
            StopParams(4),
            n=2,
            adapter=adapter,
            collection=Collection(scorer),
        )
        return [event async for event in self.engine.generate(asked)][-1]

    def states(self) -> dict[str, str]:
        cards = self.service.trajectories(1000)
        return {card.trajectory.trajectory_id: card.reason or card.state for card in cards}


@asynccontextmanager
async def world(settings: LoopSettings = SETTINGS, spill: SpillFile | None = None) -> AsyncIterator[World]:
    one = World(settings, spill)
    await one.service.start_adapter("main")
    try:
        yield one
        one.service.check_integrity()
    finally:
        await one.service.close()


async def settle(turns: int = 60) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


async def test_requests_become_versions() -> None:
    async with world() as one:
        client: TrainingClient = one.service
        assert client.status().current is None
        for _ in range(2):
            await one.request()
        await settle()
        status = client.status()
        assert status.current == AdapterRef("main", 1)
        assert (status.enabled, status.state, status.adapter, status.trained) == (True, "idle", "main", ("main",))
        assert (status.trajectories_collected, status.trajectories_waiting, status.groups_ready) == (4, 0, 0)
        assert (status.step, status.updates_total, status.updates_per_second) == (1, 1, 1 / 60)
        assert status.metrics["reward_mean"] == 0.5 == status.reward_running_mean
        assert status.metrics["loss"] == 0.5
        assert status.last_update is not None
        assert set(one.states().values()) == {"trained"}
        await one.request(AdapterRef("main", 1))
        await one.request(AdapterRef("main", 1))
        await settle()
        assert client.status().current == AdapterRef("main", 2)


async def test_rewards_may_come_by_feedback() -> None:
    async with world() as one:
        ids = [*await one.request(scorer=None), *await one.request(scorer=None)]
        for number, trajectory_id in enumerate(ids[:3]):
            one.service.feedback(trajectory_id, number / 2)
        await settle()
        assert one.learner.batches == []
        one.service.feedback(ids[3], 9.0)
        one.service.feedback(ids[3], 0.0)
        await settle()
        assert [sample.advantage for sample in one.learner.batches[0].samples] == [-0.25, 0.25, 0.5, -0.5]
        with pytest.raises(ConflictError):
            one.service.feedback(ids[0], 1.0)
        with pytest.raises(UnknownTrajectoryError):
            one.service.feedback("traj-x-0", 1.0)
        with pytest.raises(InvalidRequestError):
            one.service.feedback(ids[0], math.nan)


async def test_a_scorer_that_fails_costs_its_groups_only() -> None:
    async with world() as one:
        one.scorers.rewards = None
        failed = await one.request()
        await settle()
        one.scorers.rewards = lambda trajectory: math.inf
        not_finite = await one.request()
        await settle()
        one.scorers.rewards = first_is_best
        good = [*await one.request(), *await one.request()]
        await settle()
        states = one.states()
        assert {states[trajectory] for trajectory in (*failed, *not_finite)} == {"scoring_failed"}
        assert {states[trajectory] for trajectory in good} == {"trained"}
        assert one.service.status().drops == {"scoring_failed": 4}


async def test_a_group_that_waits_too_long_makes_do_with_what_it_has() -> None:
    async with world(replace(SETTINGS, update_frequency=3, feedback_timeout_s=0.01)) as one:
        alone = await one.request(scorer=None)
        one.service.feedback(alone[0], 1.0)
        three = trajectories("g", BASE_ADAPTER, 3, None)
        one.service.collected(three)
        for index in (0, 2):
            one.service.feedback(f"g-{index}", float(index))
        await until(lambda: one.service.status().drops == {"timeout": 2})
        await until(lambda: one.service.status().updates_total == 1)
        states = one.states()
        assert [states[trajectory] for trajectory in alone] == ["trained", "timeout"]
        assert [states[f"g-{index}"] for index in range(3)] == ["trained", "timeout", "trained"]
        assert one.service.status().drops == {"timeout": 2}
        with pytest.raises(ConflictError, match="timeout"):
            one.service.feedback(alone[1], 1.0)


@pytest.mark.parametrize(("score", "advantage"), [(1.0, 0.5), (0.0, -0.5), (-1.0, -1.5)])
async def test_one_thumb_of_a_group_is_an_update(score: float, advantage: float) -> None:
    """The first one that ever comes, and only that: nobody judges the other sample, however long it waits."""
    async with world(replace(SETTINGS, update_frequency=1, group_timeout_s=0.001)) as one:
        judged, silent = await one.request(scorer=None)
        await asyncio.sleep(0.01)
        one.service.feedback(judged, score)
        await settle()
        assert [sample.advantage for sample in one.learner.batches[0].samples] == [advantage]
        assert one.service.status().current == AdapterRef("main", 1)
        assert one.states() == {judged: "trained", silent: "waiting"}
        one.service.feedback(silent, 1.0)
        await settle()
        assert one.states() == {judged: "trained", silent: "trained"}
        with pytest.raises(ConflictError, match="taken for training"):
            one.service.feedback(judged, 0.0)


async def test_people_wait_less_where_the_setting_says_so() -> None:
    async with world(replace(SETTINGS, feedback_timeout_s=0.001)) as one:
        ids = await one.request(scorer=None)
        await until(lambda: one.service.status().drops == {"timeout": 2})
        with pytest.raises(ConflictError, match="dropped"):
            one.service.feedback(ids[0], 1.0)


async def test_a_thumb_survives_the_failure_of_the_scorer() -> None:
    async with world(replace(SETTINGS, update_frequency=1)) as one:
        one.scorers.rewards = None
        one.scorers.gate = asyncio.Event()
        judged, other = await one.request()
        one.service.feedback(judged, 1.0)
        await settle()
        assert one.learner.batches == []
        one.scorers.gate.set()
        await settle()
        assert one.states() == {judged: "trained", other: "scoring_failed"}


async def test_several_adapters_learn_each_from_what_it_drew() -> None:
    async with world(replace(SETTINGS, update_frequency=2)) as one:
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
    async with world(replace(SETTINGS, update_frequency=2)) as one:
        await one.service.check(Collection("exact"), BASE_ADAPTER)
        with pytest.raises(InvalidRequestError):
            await one.service.check(Collection("unknown"), BASE_ADAPTER)
        for stranger in (AdapterRef("math", 1), AdapterRef("main", 7)):
            with pytest.raises(ConflictError, match=str(stranger)):
                await one.service.check(Collection("exact"), stranger)
        await one.request()
        await settle()
        await one.service.check(Collection("exact"), AdapterRef("main", 1))
        foreign = await one.request(AdapterRef("main", 7))
        await settle()
        assert {one.states()[trajectory] for trajectory in foreign} == {"foreign"}
        assert len(one.learner.batches) == 1


async def test_a_request_is_told_that_what_it_drew_is_too_old_to_be_trained_on() -> None:
    async with world(replace(SETTINGS, max_staleness=1)) as one:
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
            {"foreign": 2},
        ]


async def test_a_request_is_told_that_the_buffer_cannot_hold_what_it_drew() -> None:
    async with world(replace(SETTINGS, buffer_size=1)) as one:
        told = (await one.finished(BASE_ADAPTER)).trajectory_warning
        assert told.startswith("There is no room for them in the buffer of 1 trajectories")


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
            await one.service.check(Collection("exact"), AdapterRef("main", 1))
        await one.service.check(Collection("exact"), elsewhere)


async def test_starting_again_what_is_trained_already_changes_nothing() -> None:
    async with world() as one:
        await one.service.update(given=GIVEN)
        await one.service.update(given=GIVEN)
        one.publisher.names["main"] = AdapterRef("main", 1)
        assert (await one.service.start()).step == 2, "a version of the lineage is no news"


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
        assert one.service.status().checkpoints == ("checkpoint-1",)


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


async def test_control() -> None:
    async with world(replace(SETTINGS, update_frequency=2)) as one:
        assert (await one.service.pause()).state == "paused"
        await one.request()
        await settle()
        assert one.learner.batches == []
        assert (await one.service.start()).state in ("running", "updating")
        await settle()
        assert one.service.status().current == AdapterRef("main", 1)
        await one.service.pause()
        await one.service.resume()
        assert one.service.status().state == "idle"
        status = await one.service.rollback()
        assert status.current == AdapterRef("main", 2)
        assert one.publisher.versions[AdapterRef("main", 2)] == 0.0, "the base was the best, and is no version"
        with pytest.raises(UnknownModelError):
            await one.service.rollback(to="nothing")


async def test_a_lost_request_is_counted() -> None:
    async with world() as one:
        async with aclosing(one.engine.generate(GenerationRequest(
            "gone", ((1,),), SamplingParams(), StopParams(4), n=2, collection=Collection()))) as events:  # fmt: skip
            await anext(events)
        assert one.service.status().drops == {"aborted": 2}
        assert one.service.status().trajectories_collected == 0


async def test_everything_is_told_in_order() -> None:
    async with world(replace(SETTINGS, update_frequency=2, checkpoint_interval=1)) as one:
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
            "collected", "scored", "update", "checkpoint",
            "collected", "scored", "dropped",
            "paused", "resumed", "rollback", "checkpoint", "started",
        ]  # fmt: skip
        assert seen[2].data["version"] == "main@1"
        assert seen[6].data["reasons"] == {"zero_variance": 2}
        assert {event.data["adapter"] for event in seen[:-1]} == {"main"}
        assert json.dumps([dict(event.data) for event in seen])


async def test_the_log_holds_every_trajectory_once(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    async with world(replace(SETTINGS, buffer_size=6), SpillFile(path)) as one:
        ids = [trajectory for _ in range(2) for trajectory in await one.request()]
        await settle()
        for _ in range(4):
            ids += await one.request(AdapterRef("main", 1), scorer=None)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["trajectory_id"] for line in lines] == ids[:6]
    assert [line["fate"] for line in lines] == ["trained"] * 4 + ["dropped"] * 2
    assert [line["reason"] for line in lines[4:]] == ["buffer_full"] * 2


async def test_close_gives_up_what_is_under_way() -> None:
    async with world(replace(SETTINGS, update_frequency=2)) as one:
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


# ---- events -------------------------------------------------------------------------------------


async def test_a_slow_listener_loses_the_oldest_events_is_told_how_many_and_delays_nobody() -> None:
    hub = EventHub()
    slow, quick = hub.listen(), hub.listen()
    seen: list[object] = []
    for number in range(400):
        hub.emit("scored", number=number)
        seen.append((await anext(quick)).data["number"])
    late = hub.listen()
    hub.emit("scored", number=400)
    hub.close()
    assert seen == list(range(400))
    mark, *rest = [event async for event in slow]
    assert (mark.kind, mark.data) == ("events_lost", {"events": 145})
    assert [event.data["number"] for event in rest] == list(range(145, 401))
    assert [event.data["number"] async for event in late] == [400]
    assert [event async for event in hub.listen()] == []


async def test_each_gap_in_a_listeners_events_is_marked_where_it_is() -> None:
    hub = EventHub()
    slow = hub.listen()
    hub.emit("scored", number=0)
    assert (await anext(slow)).data == {"number": 0}
    for first in (1, 259):
        for number in range(first, first + 258):
            hub.emit("scored", number=number)
        assert (await anext(slow)).data == {"events": 2}
        assert [(await anext(slow)).data["number"] for _ in range(256)] == list(range(first + 2, first + 258))


async def test_a_listener_that_is_closed_while_it_waits_ends() -> None:
    hub = EventHub()
    listener = hub.listen()
    waiting = asyncio.create_task(anext(listener, None))
    await settle()
    await listener.aclose()
    assert await waiting is None
    hub.emit("scored")
    assert await anext(listener, None) is None
