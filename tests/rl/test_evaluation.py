"""Evaluations: what each version is asked, what is made of its answers, and when they are due."""

from __future__ import annotations

import logging
import random
from itertools import count, islice
from typing import Any

import pytest
from rl.fakes import FakeEngine, FakeScorers

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    FinishReason,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SequenceOutput,
    WorkClass,
)
from mlx_parallm.errors import ConfigError, ContextLengthError, EngineDeadError, StepFailedError
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.evaluation import (
    AnswerSettings,
    EvaluationError,
    EvaluationHistory,
    Evaluator,
    HeldOutAnswers,
    HeldOutTask,
    interval,
)
from mlx_parallm.rl.rollouts.tasks import held_out_tasks, without
from mlx_parallm.rl.status import EvaluationResult

NEW = AdapterRef("math", 7)
GREEDY = AnswerSettings(samples=1, temperature=0.0, max_tokens=9)


def tasks(size: int = 4) -> tuple[HeldOutTask, ...]:
    return tuple(HeldOutTask((at,), CollectionSpec("exact", {"answer": str(at)})) for at in range(size))


class Engine(FakeEngine):
    """The answer to a prompt is its first token's number. `errors`: by that number."""

    def __init__(self, errors: dict[int, Exception] | None = None) -> None:
        super().__init__([])
        self.requests: list[GenerationRequest] = []
        self.errors = errors or {}

    async def generate(self, request: GenerationRequest):
        self.requests.append(request)
        number = request.prompts[0][0]
        if number in self.errors:
            yield RequestFailed(self.errors[number])
            return
        for index in range(request.n):
            text = f"{number}.{index}" if request.n > 1 else str(number)
            yield SequenceOutput(index, (5,), text, finish_reason=FinishReason.STOP, sampling_logprobs=(-0.5,))
        yield RequestFinished(1, request.n, 0, 0, 0, 1)


def evaluator(*parts: Any) -> Evaluator:
    return Evaluator(HeldOutAnswers(*parts))


def rewarding(*right: str) -> FakeScorers:
    return FakeScorers(lambda trajectory: float(trajectory.text in right))


# ---- the figure ----------------------------------------------------------------------------------


async def test_the_result_is_the_mean_reward_with_its_interval() -> None:
    result = await evaluator(Engine(), rewarding("0", "3"), tasks(), GREEDY).evaluate(NEW, 12)
    assert (result.adapter, result.step, result.answers, result.failed) == (NEW, 12, 4, 0)
    assert result.mean == 0.5
    assert (result.low, result.high) == pytest.approx((0.15004, 0.84996), abs=1e-5)
    assert result.metrics == {
        "eval_mean": 0.5,
        "eval_low": result.low,
        "eval_high": result.high,
        "eval_answers": 4.0,
        "eval_failed": 0.0,
    }


@pytest.mark.parametrize(
    ("right", "tasks", "low", "high"),
    # The examples of Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_rewards_of_0_and_1_get_wilsons_interval(right: int, tasks: int, low: float, high: float) -> None:
    assert interval([1.0] * right + [0.0] * (tasks - right)) == pytest.approx((low, high), abs=5e-5)


# ---- what is asked -------------------------------------------------------------------------------


async def test_every_version_answers_the_same_with_the_same_seeds() -> None:
    engine = Engine()
    settings = AnswerSettings(samples=3, temperature=0.7, max_tokens=9)
    asked = evaluator(engine, rewarding("1.0"), tasks(), settings)
    await asked.evaluate(NEW, 1)
    await asked.evaluate(AdapterRef("math", 8), 2)
    first, second = engine.requests[:4], engine.requests[4:]
    assert [request.sampling for request in first] == [request.sampling for request in second]
    assert len({request.sampling.seed + at for request in first for at in range(request.n)}) == 12
    assert {(request.n, request.sampling.temperature) for request in first} == {(3, 0.7)}
    assert {request.stopping.max_tokens for request in first} == {9}
    assert [request.adapter for request in engine.requests] == [NEW] * 4 + [AdapterRef("math", 8)] * 4
    assert {request.work_class for request in first} == {WorkClass.TRAINING}
    assert len({request.request_id for request in engine.requests}) == 8


async def test_a_task_that_fails_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine({2: ContextLengthError("too long")})
    with caplog.at_level(logging.WARNING):
        result = await evaluator(engine, rewarding("0"), tasks(), GREEDY).evaluate(NEW, 1)
    assert (result.mean, result.answers, result.failed) == (pytest.approx(1 / 3), 3, 1)
    assert "1 of 4 held-out tasks failed, the first with ContextLengthError: too long" in caplog.text


async def test_too_few_answers_or_a_dead_device_are_errors() -> None:
    broken = Engine(dict.fromkeys(range(3), StepFailedError("gone")))
    with pytest.raises(EvaluationError, match=r"3 of 4.*StepFailedError: gone"):
        await evaluator(broken, rewarding(), tasks(), GREEDY).evaluate(NEW, 1)
    with pytest.raises(EvaluationError, match=r"4 of 4.*it threw"):
        await evaluator(Engine(), FakeScorers(None), tasks(), GREEDY).evaluate(NEW, 1)
    with pytest.raises(EngineDeadError):
        await evaluator(Engine({0: EngineDeadError("stopped")}), rewarding(), tasks(), GREEDY).evaluate(NEW, 1)


# ---- when, and which is the best -----------------------------------------------------------------


def result(step: int, mean: float, version: int = 1) -> EvaluationResult:
    return EvaluationResult(AdapterRef("math", version), step, mean, mean - 0.1, mean + 0.1, 4, 0, 5.0)


def history(every: int = 3, answers: AnswerSettings = GREEDY, reward: str = "") -> EvaluationHistory:
    return EvaluationHistory(evaluator(Engine(), rewarding("0"), tasks(), answers, reward), every)


def test_evaluations_are_due_at_the_start_and_every_k_updates() -> None:
    evaluations = history(every=3)
    assert evaluations.due(0)
    evaluations.add(result(0, 0.1))
    assert [step for step in range(10) if evaluations.due(step)] == list(range(3, 10))
    evaluations.add(result(4, 0.1))
    assert [step for step in range(10) if evaluations.due(step)] == [0, 1, 2, 3, 7, 8, 9], "a rollback went behind it"
    evaluations.postpone(7)
    assert not evaluations.due(9)
    assert evaluations.due(10)
    assert not EvaluationHistory().due(0), "without tasks there are none"


def test_only_a_higher_mean_is_the_best() -> None:
    evaluations = history()
    assert [evaluations.add(result(step, mean)) for step, mean in enumerate((0.1, 0.3, 0.3, 0.2, 0.4))] == [
        *(True, True, False, False, True)
    ]


def test_a_restart_continues_unless_the_tasks_or_settings_have_changed() -> None:
    evaluations = history()
    evaluations.add(result(2, 0.6))
    evaluations.add(result(5, 0.4, version=4))
    saved = evaluations.to_metrics()
    assert all(isinstance(value, float) for value in saved.values())
    again = history()
    again.restore(saved, "math")
    assert again.last == result(5, 0.4, version=4)
    assert (again.due(7), again.due(8)) == (False, True)
    assert not again.add(result(8, 0.5)), "the best one was 0.6"
    for changed in (history(answers=AnswerSettings(1, 0.0, 10)), history(reward="another function")):
        changed.restore(saved, "math")
        assert (changed.last, changed.due(6)) == (None, True)
        assert changed.add(result(6, 0.1))
    assert history().to_metrics() == {}


# ---- which tasks ---------------------------------------------------------------------------------


class Words:
    """Endless tasks, `different` of them; the seed decides the order."""

    def __init__(self, different: int) -> None:
        self.different = different

    def tasks(self, seed: int):
        rng = random.Random(seed)
        for _ in count():
            for number in rng.sample(range(self.different), self.different):
                yield Task(({"role": "user", "content": f"word {number}"},), CollectionSpec("exact"))


def test_held_out_tasks_differ_and_are_the_same_in_every_run() -> None:
    held_out = held_out_tasks(Words(100), 10)
    assert len({str(task.messages) for task in held_out}) == 10
    assert held_out_tasks(Words(100), 10) == held_out
    assert len(held_out_tasks(Words(7), 64)) == 7
    with pytest.raises(ConfigError, match="two different tasks"):
        held_out_tasks(Words(1), 64)


def test_held_out_tasks_are_not_trained_on() -> None:
    held_out = held_out_tasks(Words(20), 5)
    trained = list(islice(without(Words(20).tasks(0), held_out), 100))
    assert {str(task.messages) for task in trained}.isdisjoint(str(task.messages) for task in held_out)
    assert len({str(task.messages) for task in trained}) == 15
    with pytest.raises(ConfigError, match="held out for evaluations; give it more tasks, or lower --eval-size"):
        next(without(Words(5).tasks(0), held_out_tasks(Words(5), 5)))
