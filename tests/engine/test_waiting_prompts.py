"""Requests that wait: they are served behind a long one, or fail when they have waited too long."""

from __future__ import annotations

import asyncio

import pytest
from harness import engine_parts, greedy, make_harness, running

from mlx_parallm.core.requests import Event, RequestFailed, RequestFinished, WorkClass
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.scheduler import SchedulerConfig
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import QueueTimeoutError


@pytest.fixture
def slow_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill is predicted to take minutes; on this machine it takes milliseconds."""
    monkeypatch.setattr(CostModel, "seconds", lambda self, chunks=(), samples=0: 1000.0)


@pytest.mark.usefixtures("slow_forecast")
def test_short_requests_are_served_behind_a_long_one() -> None:
    harness = make_harness()
    harness.submit("long", [1, 2, 3], max_tokens=60)
    harness.until(lambda: len(harness.tokens("long")) >= 5)
    shorts = [f"short {number}" for number in range(3)]
    for name in shorts:
        harness.submit(name, list(range(1, 40)), max_tokens=2)
    harness.until(lambda: all(any(isinstance(e, RequestFinished) for e in harness.of(name)) for name in shorts))
    assert len(harness.tokens("long")) < 60


# ---- the longest wait in the queue -----------------------------------------------------------------

TIMEOUT_S = 0.3
LONG, SHORT = 700, 2


def one_row() -> EngineParts:
    return engine_parts(scheduler=SchedulerConfig(max_rows=1), queue_timeout_s=TIMEOUT_S)


async def last_event(engine: ContinuousBatchProcessor, name: str, tokens: int, work: WorkClass) -> Event:
    request = greedy(name, (3, 1, 4), tokens, work_class=work)
    return [event async for event in engine.generate(request)][-1]


@pytest.mark.parametrize("work", WorkClass)
async def test_a_request_that_waits_too_long_fails_alone(work: WorkClass) -> None:
    async with running(one_row) as engine:
        first = asyncio.create_task(last_event(engine, "running", LONG, WorkClass.INFERENCE))
        while not engine.stats().running:
            await asyncio.sleep(0.01)
        waiting = await last_event(engine, "waiting", SHORT, work)
        if work is WorkClass.INFERENCE:
            assert isinstance(waiting, RequestFailed)
            assert isinstance(waiting.error, QueueTimeoutError)
        else:
            assert isinstance(waiting, RequestFinished), "a rollout waits"
        assert isinstance(await first, RequestFinished)
        assert isinstance(await last_event(engine, "later", SHORT, WorkClass.INFERENCE), RequestFinished)
