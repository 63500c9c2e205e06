"""Rollouts that are programs: what they ask, what is collected, and what their faults cost."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from functools import partial

import pytest
from rl.rollout_rig import END, LIVE, Guess, episode_of, last_message, rig, text_of

from mlx_parallm.core.requests import CollectionSpec, FinishReason, WorkClass
from mlx_parallm.errors import TrainingFailedError
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.environments.thread import EnvironmentThread


def hinted(request) -> str:
    """Episode 0 knows the answer; the others repeat the hint."""
    text = last_message(request)
    return text.removesuffix("?") if episode_of(request) == 0 else text.removeprefix("no: ") if "no" in text else "x"


async def test_a_task_becomes_one_group_of_episodes() -> None:
    async with rig(Guess(), hinted, temperature=0.7) as world:
        drawn = await world.draw(2)
        assert (drawn.failures, drawn.faults) == ((), ())
        assert [set(rewards.values()) for _, rewards in world.groups] == [{1.0, 0.5}] * 2
        assert world.ended.total() == 4
        turns, rewards = world.groups[0]
        assert drawn.tokens == sum(len(turn.completion_ids) for group, _ in world.groups for turn in group)
        assert {turn.group_id for turn in turns} == {"rollout-r-0"}
        assert [turn.collection.episode_id for turn in turns] == ["rollout-r-0-0", *["rollout-r-0-1"] * 2]
        assert [turn.collection.turn for turn in turns] == [0, 0, 1]
        assert rewards == {"rollout-r-0-0": 1.0, "rollout-r-0-1": 0.5}
        for request in world.engine.requests:
            assert (request.adapter, request.work_class, request.n) == (LIVE, WorkClass.TRAINING, 1)
            assert (request.sampling.temperature, request.stopping.max_tokens) == (0.7, 9)
        assert len({request.request_id for request in world.engine.requests}) == 6
        assert len({request.sampling.seed for request in world.engine.requests}) == 6


async def test_a_turn_continues_the_tokens_that_were_drawn() -> None:
    """Also when the template would tokenise the answer's text differently."""

    class Spelled(Guess):
        async def rollout(self, client, task):
            first = await client.ask(task.messages)
            await client.ask([*task.messages, first.message, {"role": "user", "content": "go on"}])
            await client.ask([*task.messages, first.message, {"role": "user", "content": "or so"}])
            await client.ask([*task.messages, {**first.message, "content": "edited"}, {"role": "user", "content": "?"}])
            return 1.0

    async with rig(Spelled(), lambda request: "abc", group_size=1) as world:
        draw = world.engine.generate

        async def with_other_tokens(request):
            async for event in draw(request):
                yield (
                    replace(event, token_ids=(7, 8, END), sampling_logprobs=(0, 0, 0))
                    if hasattr(event, "token_ids")
                    else event
                )

        world.engine.generate = with_other_tokens
        await world.draw()
        first, second, third, edited = world.groups[0][0]
        tokens = (*first.prompt_ids, 7, 8, END)
        for turn, text in ((second, "go on"), (third, "or so")):
            assert turn.prompt_ids == (*tokens, ord("\n"), *map(ord, f"<user>{text}"), END, *map(ord, "\n<assistant>"))
            assert turn.collection.unmatched == ""
        assert edited.prompt_ids[: len(tokens)] != tokens
        assert "not those of an earlier turn" in edited.collection.unmatched


async def test_an_answer_that_was_cut_off_is_closed_in_the_next_prompt() -> None:
    class Twice(Guess):
        async def rollout(self, client, task):
            first = await client.ask(task.messages, max_tokens=3)
            assert first.finish_reason is FinishReason.LENGTH
            await client.ask([*task.messages, first.message, {"role": "user", "content": "so"}], max_tokens=99)
            return 0.0

    async with rig(Twice(), lambda request: "ab…", group_size=1) as world:
        drawn = await world.draw()
        first, second = world.groups[0][0]
        tokens = (*first.prompt_ids, *first.completion_ids)
        assert second.prompt_ids[: len(tokens) + 2] == (*tokens, END, ord("\n"))
        assert [request.stopping.max_tokens for request in world.engine.requests] == [3, 9]
        assert drawn.faults == ()


TOOL = {"type": "function", "function": {"name": "double", "description": "Doubles.", "parameters": {"type": "object"}}}


class Doubles(Guess):
    """Offers a tool, and gives the result of each call."""

    async def rollout(self, client, task):
        messages = [*task.messages]
        for _ in range(3):
            self.answer = await client.ask(messages, tools=[TOOL])
            messages.append(self.answer.message)
            for call in self.answer.tool_calls:
                doubled = str(2 * json.loads(call.arguments)["n"])
                messages.append({"role": "tool", "tool_call_id": call.call_id, "content": doubled})
            if not self.answer.tool_calls:
                return float(self.answer.text == "8")
        return 0.0


async def test_an_answer_that_calls_a_tool_is_continued_with_its_result() -> None:
    """Though the call is spelled in another way than the template would."""
    call = '<tool_call>{"arguments":{"n":4},   "name":"double"}</tool_call>'

    def answer(request) -> str:
        return "8" if last_message(request) == "8" else f"I call it. {call}"

    environment = Doubles()
    async with rig(environment, answer, group_size=1) as world:
        drawn = await world.draw()
        ((first, second), rewards), *_ = world.groups
        assert drawn.faults == ()
        assert set(rewards.values()) == {1.0}
        assert (environment.answer.text, environment.answer.tool_calls) == ("8", ())
        assert environment.answer.prompt_tokens == len(second.prompt_ids)
        prompt, following = text_of(first.prompt_ids), second.prompt_ids[len(first.prompt_ids) :]
        assert prompt.startswith("<system>You can call functions.")
        assert '{"name": "double", "description": "Doubles."' in prompt
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert text_of(following).startswith(f"I call it. {call}")
        assert "<user><tool_response>\n8\n</tool_response>" in text_of(following)
        assert second.collection.unmatched == ""


async def test_a_reward_of_none_is_left_to_the_scorer_of_the_task() -> None:
    class Unrewarded(Guess):
        def tasks(self, seed):
            yield Task(({"role": "user", "content": "a"},), CollectionSpec("exact", {"answer": "a"}))
            yield Task(({"role": "user", "content": "b"},), CollectionSpec())

        async def rollout(self, client, task):
            await client.ask(task.messages)

    async with rig(Unrewarded(), lambda request: "a") as world:
        drawn = await world.draw(2)
        ((turns, rewards),) = world.groups
        assert rewards == {}
        assert {turn.collection.scorer for turn in turns} == {"exact"}
        assert len(drawn.failures) == 1
        assert "task 1: the environment gave no reward, and the task names no scoring function" in drawn.failures[0]


class Faulty(Guess):
    """Episode 1 does `fault`."""

    def __init__(self, fault) -> None:
        self.fault = fault

    async def rollout(self, client, task):
        answer = await client.ask(task.messages)
        if answer.text == "1":
            return await self.fault(client)
        return 1.0


async def raises(client):
    raise KeyError("tool")


async def exits(client):
    raise SystemExit(3)


async def cancels(client):
    raise asyncio.CancelledError


async def hangs(client):
    await asyncio.sleep(1000)


async def hangs_in_a_thread(client):
    await asyncio.to_thread(threading.Event().wait)


async def rewards_nonsense(client):
    return float("nan")


async def asks_for_ever(client):
    while True:
        await client.ask([{"role": "user", "content": "again"}])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raises, "KeyError: 'tool'"),
        (exits, "SystemExit"),
        (cancels, "CancelledError"),
        (hangs, "took too long"),
        (hangs_in_a_thread, "took too long"),
        (rewards_nonsense, "finite number"),
        (asks_for_ever, "at most 100 turns"),
    ],
)
async def test_an_episode_that_fails_costs_itself_only(fault, message) -> None:
    numbered = lambda request: str(episode_of(request))  # noqa: E731
    async with rig(Faulty(fault), numbered, group_size=3, timeout_s=9 if fault is asks_for_ever else 0.6) as world:
        drawn = await world.draw(2)
        assert drawn.failures == ()
        assert [len(rewards) for _, rewards in world.groups] == [2, 2]
        for turns, rewards in world.groups:
            assert {turn.collection.episode_id for turn in turns} == set(rewards)
        assert [fault.startswith(f"task {n}: 1 of 3 episodes failed") for n, fault in enumerate(drawn.faults)] == [
            True
        ] * 2
        assert message in drawn.faults[0]
        assert world.ended.total() == 4
        assert world.engine.running == 0


async def exits_a_task() -> None:
    raise SystemExit(3)


async def interrupts_a_callback() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    asyncio.get_running_loop().call_soon(interrupt)


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()


@pytest.mark.parametrize("ends", [exits_a_task, interrupts_a_callback, stops_the_loop])
async def test_code_that_would_end_the_thread_beside_a_rollout_costs_no_other_one(ends) -> None:
    class Beside(Guess):
        async def rollout(self, client, task):
            answer = await client.ask(task.messages)
            beside = ends if answer.text == "1" else partial(asyncio.sleep, 1)
            await asyncio.wait([asyncio.create_task(beside())], timeout=0.05)
            return 1.0

    async with rig(Beside(), lambda request: str(episode_of(request)), group_size=3) as world:
        for _ in range(2):
            drawn = await world.draw(2)
            assert (drawn.failures, drawn.faults) == ((), ())
        assert [len(rewards) for _, rewards in world.groups] == [3] * 4


async def test_closing_waits_until_the_environment_has_ended_its_tools() -> None:
    """Nothing else ends them once the process is gone."""
    begun, ended, thread = threading.Event(), [], EnvironmentThread()

    async def plays() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            ended.append("tool")

    playing = asyncio.ensure_future(thread.run(plays, lambda: 60.0))
    await asyncio.to_thread(begun.wait)
    thread.close()
    assert ended == ["tool"]
    await asyncio.wait([playing])


async def test_a_thread_that_a_rollout_blocked_ends_with_it() -> None:
    go = threading.Event()

    class Blocks(Guess):
        async def rollout(self, client, task):
            go.wait()

    before = {*threading.enumerate()}
    async with rig(Blocks(), hinted, timeout_s=0.2) as world:
        assert "took too long" in (await world.draw()).failures[0]
        blocked = {*threading.enumerate()} - before
        assert "environment" in {thread.name for thread in blocked}
        go.set()
        for thread in blocked:
            thread.join(10)
            assert not thread.is_alive()


async def test_a_task_whose_episodes_all_fail_is_a_failure_and_is_not_collected() -> None:
    class Broken(Guess):
        async def rollout(self, client, task):
            raise RuntimeError("no network")

    async with rig(Broken(), hinted) as world:
        drawn = await world.draw(2)
        assert drawn.failures == ("task 0: RuntimeError: no network", "task 1: RuntimeError: no network")
        assert world.groups == []


async def test_an_environment_that_hangs_before_its_next_task_ends_the_draw() -> None:
    class Stuck(Guess):
        def tasks(self, seed):
            threading.Event().wait()
            yield

    async with rig(Stuck(), hinted, timeout_s=0.2) as world:
        with pytest.raises(TrainingFailedError, match=r"no task within 0\.2 s"):
            await world.draw()


async def test_a_draw_that_is_cancelled_leaves_no_request_behind() -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Waits(Guess):
        async def rollout(self, client, task):
            await client.ask(task.messages)
            loop.call_soon_threadsafe(started.set)
            await asyncio.sleep(1000)

    async with rig(Waits(), lambda request: "x") as world:
        drawing = asyncio.create_task(world.draw())
        await started.wait()
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        assert world.engine.running == 0
        assert world.groups == []
