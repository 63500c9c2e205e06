"""Rollouts that no client asks for: what they ask of the engine, and what ends them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from itertools import count

import pytest
from rl.fakes import FakeEngine

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StopParams,
    WorkClass,
)
from mlx_parallm.errors import ContextLengthError, EngineDeadError, EngineError, StepFailedError, TrainingFailedError
from mlx_parallm.model.tools.formats import HERMES
from mlx_parallm.rl.environments import Task
from mlx_parallm.rl.rollouts.answers import RolloutResult, Rollouts, RolloutSettings, events_of

LIVE = AdapterRef("math", 3)


class Engine(FakeEngine):
    """Answers with a token a sequence; keeps the requests, and the leases that were held then."""

    def __init__(self, leases: Leases) -> None:
        super().__init__([])
        self.requests: list[GenerationRequest] = []
        self._leases = leases

    async def generate(self, request: GenerationRequest):
        assert self._leases.held[str(request.adapter)] > 0, "the version is leased while it draws"
        self.requests.append(request)
        await asyncio.sleep(0)
        yield RequestFinished(1, request.n, 0, 0, 0, 1)


class Leases:
    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    @contextmanager
    def lease(self, selector: str | None, key: str | None = None):
        assert selector == "math"
        self.held[str(LIVE)] = self.held.get(str(LIVE), 0) + 1
        try:
            yield LIVE
        finally:
            self.held[str(LIVE)] -= 1


class Tokenizer:
    """A token a message: how long it is. Its template does not support tools."""

    tool_format = HERMES

    def apply_chat_template(self, messages, add_generation_prompt=True, at_most=None):
        return [len(message["content"]) for message in messages]


def tasks(first: int = 1):
    for number in count(first):
        yield Task(({"role": "user", "content": "x" * number},), CollectionSpec("exact", {"answer": str(number)}))


def rollouts(
    seed: int = 0, given: Iterable[Task] | None = None, **options: object
) -> tuple[Rollouts, Engine, Leases, list[int]]:
    leases, told = Leases(), []
    engine = Engine(leases)
    settings = RolloutSettings(group_size=4, max_tokens=9, seed=seed, **options)
    return (
        Rollouts(
            lambda request: engine.generate(request),
            leases,
            Tokenizer(),
            tasks(settings.taken + 1) if given is None else iter(given),
            settings,
            lambda number, count: told.extend([number] * count),
        ),
        engine,
        leases,
        told,
    )


async def test_each_task_becomes_one_collected_group_of_class_training() -> None:
    rolling, engine, leases, told = rollouts(temperature=0.8)
    assert await rolling.sample(3, "math") == RolloutResult(12, ())
    assert await rolling.sample(1, "math") == RolloutResult(4, ())
    assert [request.prompts for request in engine.requests] == [((1,),), ((2,),), ((3,),), ((4,),)]
    assert [request.collection.metadata["answer"] for request in engine.requests] == ["1", "2", "3", "4"]
    for request in engine.requests:
        assert (request.n, request.adapter, request.work_class) == (4, LIVE, WorkClass.TRAINING)
        assert (request.sampling.temperature, request.stopping.max_tokens) == (0.8, 9)
    assert len({request.request_id for request in engine.requests}) == 4
    assert Counter(told) == dict.fromkeys(range(4), 4)
    assert leases.held == {str(LIVE): 0}


async def test_a_task_with_turns_of_tools_is_drawn_as_its_template_can_write_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "yes"},
    )
    rolling, engine, *_ = rollouts(given=[Task(turns, CollectionSpec("exact", {"answer": "1"}))])
    await rolling.sample(1, "math")
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert engine.requests[0].prompts == ((1, len(written), len("<tool_response>\nyes\n</tool_response>")),)
    assert engine.requests[0].collection.messages == turns


async def test_no_two_samples_of_any_runs_share_a_seed() -> None:
    seeds = []
    for seed in (0, 1, 2**20):
        rolling, engine, _, _ = rollouts(seed)
        await rolling.sample(50, "math")
        seeds += [request.sampling.seed + at for request in engine.requests for at in range(request.n)]
    assert len(set(seeds)) == len(seeds) == 3 * 50 * 4


async def test_a_run_that_goes_on_draws_what_it_would_have_drawn_without_a_stop() -> None:
    whole, engine, _, _ = rollouts(run="a")
    await whole.sample(6, "math")
    assert whole.taken == 6
    again, resumed, _, _ = rollouts(run="a", taken=4)
    await again.sample(2, "math")
    asked = [(r.request_id, r.prompts, r.sampling.seed) for r in engine.requests]
    assert [(r.request_id, r.prompts, r.sampling.seed) for r in resumed.requests] == asked[4:]
    assert len({name for name, _, _ in asked}) == 6
    other, stranger, _, _ = rollouts(run="b")
    await other.sample(6, "math")
    assert {r.request_id for r in stranger.requests}.isdisjoint(name for name, _, _ in asked), "another run"


async def test_a_task_that_fails_costs_itself_only() -> None:
    rolling, engine, leases, told = rollouts()
    answer, raised = engine.generate, []

    async def long_prompts_fail(request: GenerationRequest):
        if request.prompts == ((2,),):
            raise ContextLengthError("too long")
        async for event in answer(request):
            yield event

    def broken_tasks(good):
        yield next(good)
        raised.append(True)
        raise KeyError("column")

    engine.generate = long_prompts_fail
    assert await rolling.sample(3, "math") == RolloutResult(8, ("task 1: too long",))
    assert len(told) == 8
    assert leases.held == {str(LIVE): 0}
    rolling._tasks = broken_tasks(rolling._tasks)
    with pytest.raises(TrainingFailedError, match="no more tasks after it raised: 'column'"):
        await rolling.sample(3, "math")
    assert raised


async def test_a_dead_engine_ends_the_draw() -> None:
    rolling, engine, leases, _ = rollouts()

    async def dies(request: GenerationRequest):
        raise EngineDeadError("the device thread has stopped")
        yield

    engine.generate = dies
    with pytest.raises(EngineDeadError):
        await rolling.sample(2, "math")
    assert leases.held == {str(LIVE): 0}


async def test_an_engine_that_fails_costs_its_task_and_gives_the_lease_back() -> None:
    rolling, engine, leases, told = rollouts()

    async def fails(request: GenerationRequest):
        yield RequestFailed(StepFailedError("out of memory"))

    engine.generate = fails
    assert await rolling.sample(1, "math") == RolloutResult(0, ("task 0: out of memory",))
    assert leases.held == {str(LIVE): 0}
    assert told == []


async def test_a_request_without_an_end_is_an_error() -> None:
    request = GenerationRequest("r", ((1,),), SamplingParams(), StopParams(1))
    with pytest.raises(EngineError, match="terminal"):
        [event async for event in events_of(FakeEngine([]).generate(request))]
