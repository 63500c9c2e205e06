"""What of a request's events becomes trajectories, and what of a request that does not finish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, nullcontext

import pytest
from rl.fakes import FakeEngine

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import (
    CollectionSpec,
    Event,
    FinishReason,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import EngineError, StepFailedError
from mlx_parallm.rl.recording import record

REF = AdapterRef("math", 3)
FINISHED = RequestFinished(4, 4, 0.0, 0.0, 0.0, 1.0)


class Seen:
    def __init__(self) -> None:
        self.groups: list[list[Trajectory]] = []
        self.aborted = 0
        self.warning = ""

    async def on_group(self, group: Sequence[Trajectory]) -> str:
        self.groups.append(list(group))
        return self.warning

    def on_abort(self) -> None:
        self.aborted += 1

    def collect(self, engine: FakeEngine, asked: GenerationRequest) -> AsyncIterator[Event]:
        return record(asked, engine.generate(asked), self.on_group, self.on_abort, nullcontext())


def request(prompts: tuple[tuple[int, ...], ...] = ((1, 2),), n: int = 2, **fields: object) -> GenerationRequest:
    values = {"adapter": REF, "collection": CollectionSpec("exact", {"answer": "4"}), **fields}
    return GenerationRequest("cmpl-7", prompts, SamplingParams(temperature=0.7), StopParams(8), n=n, **values)


def out(index: int, tokens: tuple[int, ...], text: str, end: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(index, tokens, text, finish_reason=end, sampling_logprobs=tuple(-0.1 * t for t in tokens))


async def run(events: Sequence[Event], asked: GenerationRequest) -> tuple[list[Event], Seen]:
    seen = Seen()
    return [event async for event in seen.collect(FakeEngine(events), asked)], seen


async def test_each_prompt_becomes_a_group_of_exactly_what_was_drawn() -> None:
    events = [
        out(1, (8,), "b"),
        out(0, (5,), "a"),
        out(2, (9,), "", FinishReason.STOP),
        out(0, (6,), "", None),
        out(3, (7,), "d", FinishReason.LENGTH),
        out(0, (2,), "", FinishReason.STOP),  # the end-of-sequence token is kept; the text leaves it out
        out(1, (8,), "!", FinishReason.LENGTH),
        FINISHED,
    ]
    got, seen = await run(events, request(((1, 2), (3,))))
    assert got[:-1] == events[:-1]
    ids = tuple(f"traj-cmpl-7-{index}" for index in range(4))
    assert got[-1] == RequestFinished(4, 4, 0.0, 0.0, 0.0, 1.0, trajectory_ids=ids)
    assert [[t.trajectory_id for t in group] for group in seen.groups] == [list(ids[:2]), list(ids[2:])]
    first, second, third, _ = (t for group in seen.groups for t in group)
    assert first.completion_ids == (5, 6, 2)
    assert first.sampling_logprobs == (-0.5, pytest.approx(-0.6), -0.2)
    assert (first.text, first.finish_reason) == ("a", FinishReason.STOP)
    assert (second.text, second.finish_reason) == ("b!", FinishReason.LENGTH)
    assert (first.prompt_ids, third.prompt_ids) == ((1, 2), (3,))
    assert first.group_id == second.group_id != third.group_id
    assert (first.adapter, first.temperature, first.group_size) == (REF, 0.7, 2)
    assert first.collection == CollectionSpec("exact", {"answer": "4"})
    assert seen.aborted == 0


async def test_a_request_that_fails_leaves_nothing_but_a_count() -> None:
    failed = RequestFailed(StepFailedError("a fault"))
    got, seen = await run([out(0, (5,), "a", FinishReason.LENGTH), failed], request(((1,), (2,))))
    assert got[-1] is failed
    assert (seen.groups, seen.aborted) == ([], 1)


async def test_a_request_that_is_aborted_leaves_nothing_and_is_aborted_in_the_engine() -> None:
    seen, engine = Seen(), FakeEngine([out(0, (5,), "a"), out(0, (6,), "b"), FINISHED])
    async with aclosing(seen.collect(engine, request(n=1))) as events:
        assert await anext(events) == engine.events[0]
    assert engine.closed == 1
    assert (seen.groups, seen.aborted) == ([], 1)


async def test_tokens_without_logprobs_are_never_handed_over() -> None:
    with pytest.raises(EngineError, match="logprobs"):
        await run([SequenceOutput(0, (5,), "a", finish_reason=FinishReason.STOP), FINISHED], request(n=1))
