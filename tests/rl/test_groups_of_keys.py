"""Groups, episodes and rewards of several API keys that use the same ids."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from functools import partial
from pathlib import Path

import pytest
from rl.fakes import FakeEngine
from rl.service_rig import CHECKPOINTING, GIVEN, SETTINGS, World, world
from rl.test_recovery import Run

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
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
from mlx_parallm.errors import ConflictError, UnknownModelError, UnknownTrajectoryError
from mlx_parallm.extras.competition.comparison import ComparisonSpec
from mlx_parallm.extras.people.service import Edit

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


async def test_every_key_rewards_what_the_server_has_sampled_itself(tmp_path: Path) -> None:
    async with Run(tmp_path / "journal.sqlite").process() as one:
        await answer(one, "", episode_id="e", group_id="g")
        await one.service.trajectories.reward_episode("e", "g", 0.25, ONE)
        assert set(one.states().values()) == {"scored"}
        await one.service.trajectories.close_group("g", TWO)


async def test_groups_of_unknown_owners_are_for_admins(tmp_path: Path) -> None:
    """Such as those that another program has sent."""
    async with Run(tmp_path / "journal.sqlite").process() as one:
        collected = one.service.trajectories
        await answer(one, None, episode_id="e", group_id="g")
        for refused in (collected.reward_episode("e", "g", 0.5, ONE), collected.close_group("g", ONE)):
            with pytest.raises(UnknownTrajectoryError):
                await refused
        await collected.close_group("g", BOSS)


async def test_an_admin_hears_that_anothers_group_has_ended(tmp_path: Path) -> None:
    async with Run(tmp_path / "journal.sqlite").process() as one:
        collected = one.service.trajectories
        await answer(one, "one", episode_id="e", group_id="g")
        await collected.close_group("g", ONE)  # it has no reward, and is dropped
        for reader, error in ((BOSS, ConflictError), (ONE, ConflictError), (TWO, UnknownTrajectoryError)):
            with pytest.raises(error):
                await collected.close_group("g", reader)
            with pytest.raises(error):
                await collected.reward_episode("e", "g", 0.5, reader)


async def test_late_feedback_on_anothers_answer_is_refused_too(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        mine = await answer(one, "one", group_id="g")
        await one.service.trajectories.close_group("g", ONE)  # it has no reward, and is dropped
        with pytest.raises(UnknownTrajectoryError):
            await one.service.trajectories.feedback(mine, 1.0, "", TWO)
        assert (await one.service.trajectories.feedback(mine, 1.0, "", ONE)).late


async def test_an_admin_must_say_whose_group_is_meant(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        for key in ("one", "two"):
            await answer(one, key, group_id="g")
        with pytest.raises(ConflictError, match="Several keys have a group 'g'"):
            await one.service.trajectories.close_group("g", BOSS)
        await answer(one, "boss", group_id="g")
        await one.service.trajectories.close_group("g", BOSS)
        assert set(groups(one)) == {("one", "g"), ("two", "g")}, "its own comes first"


async def test_what_a_key_may_not_see_learns_nothing_from_it() -> None:
    """Answers of the base model train the default adapter."""
    limited = Reader("one", sees=lambda name: name in ("base", "acme"))
    async with world() as one:
        service = one.service
        await service.trajectories.check(CollectionSpec(), BASE_ADAPTER, ONE)
        with pytest.raises(ConflictError) as refused:
            await service.trajectories.check(CollectionSpec(), BASE_ADAPTER, limited)
        assert "main" not in str(refused.value)
        await service.start("acme", reader=limited)
        acme = AdapterRef("acme", 1)
        await service.update("acme", GIVEN, reader=limited)
        await service.trajectories.check(CollectionSpec(group_id="g"), acme, limited)
        await answer(one, "one", group_id="g")  # when it was not limited yet
        with pytest.raises(ConflictError) as refused:
            await service.trajectories.check(CollectionSpec(group_id="g"), acme, limited)
        assert "main" not in str(refused.value)


async def test_training_that_a_reader_does_not_see_is_unknown_to_it() -> None:
    limited = Reader("one", sees=lambda name: name.startswith("acme"))
    async with world() as one:
        service = one.service
        await service.start("other")
        await service.start("acme", reader=limited)
        spec, edit = ComparisonSpec("checkpoint-1"), Edit("other", (1,), (2,))
        for name in (None, "main", "other", "nobody"):
            for refused in (
                service.start(name, reader=limited),
                service.pause(name, reader=limited),
                service.resume(name, reader=limited),
                service.rollback(name, reader=limited),
                service.update(name, GIVEN, reader=limited),
                service.save(name, None, (), {}, reader=limited),
                one.competition.start(name, spec, limited),
                one.competition.stop(name, limited),
            ):
                with pytest.raises(UnknownModelError) as error:
                    await refused
                assert "main" not in str(error.value).replace(f"'{name}'", "")
            for refuses in (service.status, partial(service.history, limit=9)):
                with pytest.raises(UnknownModelError):
                    refuses(name, reader=limited)
            with pytest.raises(UnknownModelError):
                one.people.signal_report(name, limited)
            assert not service.trains(name, reader=limited)
        with pytest.raises(UnknownModelError):
            await one.people.edit(edit, limited)
        assert [status.adapter for status in service.statuses(reader=limited)] == ["acme"]
        assert service.status("acme", reader=limited).trained == ("acme",)
        assert service.trains("acme", reader=limited)
        assert [status.adapter for status in service.statuses()] == ["main", "other", "acme"]


async def test_the_events_of_a_group_are_its_owners() -> None:
    one = World(SETTINGS, None, CHECKPOINTING)
    await one.service.start_adapter("main")
    streams = {reader.name: one.service.events(reader=reader) for reader in (ONE, TWO, BOSS)}
    limited = one.service.events(reader=Reader("one", sees=lambda name: name != "main"))
    await answer(one, "one", group_id="g")
    await answer(one, "two", group_id="h")
    await one.service.close()
    seen = {name: [event.data async for event in stream] for name, stream in streams.items()}
    groups_seen = {name: {data["group_id"] for data in seen[name] if "group_id" in data} for name in seen}
    assert groups_seen == {"one": {"g"}, "two": {"h"}, "boss": {"g", "h"}}
    assert not any("key" in data for name in ("one", "two") for data in seen[name])
    assert [event async for event in limited] == []


async def test_an_edit_does_not_replace_that_of_another_keys_user(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        cards = [
            await one.people.edit(Edit("main", (1,), (text, 2), user="ann", owner=key))
            for key, text in (("one", 3), ("two", 3), ("two", 4))
        ]
        assert [card.waiting for card in cards] == [1, 2, 2]


async def test_a_journal_from_before_has_groups_of_all_keys(tmp_path: Path) -> None:
    """Its rewards and ends name no key."""
    file = tmp_path / "journal.sqlite"
    run = Run(file)
    async with run.process() as one:
        await answer(one, "one", episode_id="e", group_id="g", group_size=2)
        await answer(one, "one", episode_id="f", group_id="g", group_size=2)
        await one.service.trajectories.reward_episode("e", "g", 0.25, ONE)
        await one.service.trajectories.close_group("g", ONE)
        await asyncio.sleep(0)
        before = one.states()
    with sqlite3.connect(file) as journal:
        for number, text in journal.execute("SELECT number, body FROM intake WHERE kind != 'trajectory'").fetchall():
            body = {name: value for name, value in json.loads(text).items() if name != "key"}
            journal.execute("UPDATE intake SET body = ? WHERE number = ?", (json.dumps(body), number))
    journal.close()
    async with run.process() as one:
        waiting = {name: state for name, state in before.items() if state == "scored"}
        assert waiting
        assert one.states() == waiting
