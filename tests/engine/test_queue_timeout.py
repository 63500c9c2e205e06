"""A request waits in the queue only so long; those that the device has begun with go on to their end."""

from __future__ import annotations

import asyncio

import pytest
from harness import PlainText, make_harness

from mlx_parallm.core.requests import (
    Event,
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StopParams,
    WorkClass,
)
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.scheduler import SchedulerConfig
from mlx_parallm.engine.text import Vocabulary
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import QueueTimeoutError

TIMEOUT_S = 0.3
LONG, SHORT = 700, 2


def one_row() -> EngineParts:
    harness = make_harness()
    vocabulary = Vocabulary(263, frozenset(), lambda *_: PlainText())
    cost = CostModel(0.01, 1e-4, 1e-8)
    return EngineParts(
        harness.runner,
        harness.adapters,
        vocabulary,
        SchedulerConfig(max_rows=1),
        cost,
        queue_timeout_s=TIMEOUT_S,
    )


async def last_event(engine: ContinuousBatchProcessor, name: str, tokens: int, work: WorkClass) -> Event:
    request = GenerationRequest(
        name, ((3, 1, 4),), SamplingParams(temperature=0.0), StopParams(tokens), work_class=work
    )
    return [event async for event in engine.generate(request)][-1]


@pytest.mark.parametrize("work", WorkClass)
async def test_a_request_that_waits_too_long_fails_alone(work: WorkClass) -> None:
    engine = ContinuousBatchProcessor(one_row, debug=True)
    await asyncio.to_thread(engine.start)
    try:
        running = asyncio.create_task(last_event(engine, "running", LONG, WorkClass.INFERENCE))
        while not engine.stats().running:
            await asyncio.sleep(0.01)
        waiting = await last_event(engine, "waiting", SHORT, work)
        if work is WorkClass.INFERENCE:
            assert isinstance(waiting, RequestFailed)
            assert isinstance(waiting.error, QueueTimeoutError)
        else:
            assert isinstance(waiting, RequestFinished), "a rollout waits"
        assert isinstance(await running, RequestFinished)
        assert isinstance(await last_event(engine, "later", SHORT, WorkClass.INFERENCE), RequestFinished)
    finally:
        await asyncio.to_thread(engine.stop)
