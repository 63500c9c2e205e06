"""Evaluations of environments that do their held-out tasks themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from rl.fakes import FakeScorers
from rl.rollout_rig import Engine, Guess, Tokenizer, last_message

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import GenerationRequest, WorkClass
from mlx_parallm.errors import EngineDeadError
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.environments.thread import EnvironmentThread
from mlx_parallm.rl.evaluation import AnswerSettings, EvaluationError, Evaluator, HeldOutEpisodes
from mlx_parallm.rl.rollouts.episodes import play
from mlx_parallm.rl.rollouts.tasks import held_out_tasks

NEW = AdapterRef("math", 7)
GREEDY = AnswerSettings(samples=1, temperature=0.0, max_tokens=9)


class World:
    """An evaluator of `size` tasks of an environment, over a model that answers as a function says."""

    def __init__(
        self,
        environment: Guess,
        answer: Callable[[GenerationRequest], str],
        settings: AnswerSettings = GREEDY,
        size: int = 4,
        reward: str = "",
        score: Callable[[Any], float] = lambda trajectory: float(trajectory.text == "b"),
    ) -> None:
        self.thread, self.engine = EnvironmentThread(), Engine(answer)
        tasks = held_out_tasks(environment, size)
        held_out = HeldOutEpisodes(
            partial(play, environment, self.thread),
            self.engine,
            Tokenizer(),
            FakeScorers(score),
            tasks,
            settings,
            2.0,  # seconds for an episode
            reward,
        )
        self.evaluator = Evaluator(held_out)

    async def evaluate(self, version: AdapterRef = NEW):
        try:
            return await self.evaluator.evaluate(version, 12)
        finally:
            self.thread.close()


def answers_after_the_hint(request: GenerationRequest) -> str:
    """Task 0 is known; the others repeat the hint, and task 3 does not."""
    text = last_message(request)
    if text == "0?":
        return "0"
    return text.removeprefix("no: ") if text.startswith("no: ") and text != "no: 3" else "x"


async def test_the_environment_plays_the_tasks_and_its_rewards_count() -> None:
    world = World(Guess(), answers_after_the_hint)
    result = await world.evaluate()
    assert (result.adapter, result.step, result.answers, result.failed) == (NEW, 12, 4, 0)
    assert result.mean == pytest.approx((1.0 + 0.5 + 0.5 + 0.0) / 4)
    assert result.low < result.mean < result.high
    assert len(world.engine.requests) == 1 + 3 * 2, "the second turn is played too"
    for request in world.engine.requests:
        assert (request.adapter, request.work_class, request.n) == (NEW, WorkClass.TRAINING, 1)
        assert (request.sampling.temperature, request.stopping.max_tokens) == (0.0, 9)


async def raises() -> float:
    raise KeyError("tool")


async def hangs() -> float:
    await asyncio.sleep(1000)
    return 1.0


async def gives_nan() -> float:
    return float("nan")


class Faulty(Guess):
    """The rollouts of one task, or of one of its episodes, do `fault`."""

    def __init__(self, fault, text: str = "2") -> None:
        self.fault, self.text = fault, text

    async def rollout(self, client, task: Task) -> float:
        answer = await client.ask(task.messages)
        return await self.fault() if answer.text == self.text else 1.0


@pytest.mark.parametrize(
    ("fault", "told"), [(raises, "KeyError: 'tool'"), (hangs, "took too long"), (gives_nan, "a finite number")]
)
async def test_an_episode_that_fails_is_left_out_and_counted(fault, told, caplog: pytest.LogCaptureFixture) -> None:
    """It is not counted as 0, which is not the lowest reward of every environment."""
    world = World(Faulty(fault), lambda request: last_message(request).removesuffix("?"))
    with caplog.at_level(logging.WARNING):
        result = await world.evaluate()
    assert (result.mean, result.answers, result.failed) == (1.0, 3, 1)
    assert "1 of 4 held-out tasks failed" in caplog.text
    assert told in caplog.text


async def test_too_few_episodes_or_a_dead_device_are_errors() -> None:
    world = World(Faulty(raises, text="x"), lambda request: "x")
    with pytest.raises(EvaluationError, match=r"4 of 4 held-out tasks failed.*tool"):
        await world.evaluate()

    def stopped(request: GenerationRequest) -> str:
        raise EngineDeadError("stopped")

    with pytest.raises(EngineDeadError):
        await World(Guess(), stopped).evaluate()
