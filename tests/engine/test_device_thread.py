"""`run`: calls from the event loop on the thread that owns MLX, between two units."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import partial

import mlx.core as mx
import pytest
from harness import engine_parts, greedy, make_harness, running, solo, tokens_in
from micro_steps import MicroSteps
from tiny import tiny_model

from mlx_parallm.core.device import completed, then
from mlx_parallm.core.machine import MachineState, Relief
from mlx_parallm.core.requests import RequestFailed
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import EngineDeadError, RankLostError

PROMPT = [3, 1, 4, 1, 5]


def begin(training: MicroSteps, count: int) -> Future[int]:
    """Begins training of so many micro-steps. Returns a future of how many were made by its end."""
    finished = Future[int]()
    training.left = count
    training.step = lambda number: finished.set_result(number + 1) if training.left == 1 else None
    return finished


@pytest.fixture
def training() -> MicroSteps:
    return MicroSteps()


@pytest.fixture
async def engine(training: MicroSteps) -> AsyncIterator[ContinuousBatchProcessor]:
    async with running(lambda: engine_parts(training=training)) as processor:
        yield processor


async def generate(engine: ContinuousBatchProcessor, request_id: str, max_tokens: int = 30) -> list[int]:
    return tokens_in([event async for event in engine.generate(greedy(request_id, PROMPT, max_tokens))])


async def test_a_future_is_waited_for_beside_requests(engine: ContinuousBatchProcessor, training: MicroSteps) -> None:
    """Training that is begun so wakes an idle loop, and runs to its end."""
    expected = solo(tiny_model("llama"), PROMPT, 30).tokens
    assert await engine.run(lambda: begin(training, 5)) == 5
    learnt, *said = await asyncio.gather(
        engine.run(lambda: begin(training, 5)), *(generate(engine, str(i)) for i in range(4))
    )
    assert learnt == 10
    assert said == [expected] * 4


async def test_who_stops_waiting_harms_nobody(engine: ContinuousBatchProcessor) -> None:
    futures: list[Future[int]] = []

    def later() -> Future[int]:
        futures.append(Future())
        return futures[-1]

    for finish in (lambda future: future.set_result(1), lambda future: future.set_exception(RuntimeError("late"))):
        task = asyncio.create_task(engine.run(later))
        while not futures:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        future = futures.pop()
        await engine.run(partial(finish, future))
        assert await engine.run(lambda: "alive") == "alive"


async def test_a_stopped_thread_is_an_error_not_a_wait(engine: ContinuousBatchProcessor) -> None:
    waiting = asyncio.create_task(engine.run(Future))
    await engine.run(lambda: None)
    await asyncio.to_thread(engine.stop)
    with pytest.raises(EngineDeadError):
        await waiting
    with pytest.raises(EngineDeadError):
        await engine.run(lambda: None)


async def test_what_raises_costs_whoever_asked_and_nobody_else(engine: ContinuousBatchProcessor) -> None:
    """In the middle of an answer too: the step in flight is read before the call runs."""
    expected = solo(tiny_model("llama"), PROMPT, 60).tokens
    answer = asyncio.create_task(generate(engine, "r", 60))

    def broken() -> None:
        raise RuntimeError("[metal::malloc] injected")

    def broken_later() -> Future[None]:
        return then(completed(None), lambda _: broken())

    for call in (broken, broken_later, broken):
        with pytest.raises(RuntimeError, match="injected"):
            await engine.run(call)
    assert await answer == expected
    stats = engine.stats()
    assert (stats.alive, stats.failed_steps_total, stats.preemptions_total) == (True, 0, 0)


async def test_a_lost_rank_fails_what_runs_though_the_device_thread_hangs(engine: ContinuousBatchProcessor) -> None:
    hangs, released = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        released.wait()

    events = engine.generate(greedy("r", PROMPT, 3000))
    await anext(events)
    hanging = asyncio.create_task(engine.run(hang))
    await asyncio.to_thread(hangs.wait)
    engine.lose("rank 1 is lost")
    (failed,) = [event async for event in events if isinstance(event, RequestFailed)]
    assert isinstance(failed.error, RankLostError)
    assert "rank 1 is lost" in str(failed.error)
    assert not engine.stats().alive
    for late in (hanging, generate(engine, "late")):
        with pytest.raises(RankLostError, match="rank 1 is lost"):
            await late
    released.set()


async def test_sleep_waits_for_requests_and_gives_the_pool_back(engine: ContinuousBatchProcessor) -> None:
    before = await engine.run(mx.get_active_memory)
    answer = asyncio.create_task(generate(engine, "r", 400))
    await asyncio.sleep(0.01)
    assert not answer.done()
    await engine.sleep()
    assert answer.done()
    assert engine.stats().kv_bytes_held == 0
    after = await engine.run(mx.get_active_memory)
    assert after - before < 20_000, "nothing keeps an arena"
    assert await engine.run(mx.get_cache_memory) == 0
    assert len(await generate(engine, "s", 5)) == 5, "and the next request takes it again"


async def test_an_idle_engine_gives_cached_prefixes_back_while_memory_is_short(
    engine: ContinuousBatchProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.engine.memory._PAUSE_S", 0.0)
    await generate(engine, "r", 100)
    while not engine.stats().kv_bytes_cached:
        await asyncio.sleep(0.01)
    engine.heed(MachineState(9, 8, Relief.PREFIXES, "too much"))
    assert engine.stats().machine.footprint == 9
    while engine.stats().kv_bytes_cached:
        await asyncio.sleep(0.01)


def test_an_engine_that_was_stopped_leaves_its_memory() -> None:
    """A program may start one engine after another, and each has a model."""
    device = ContinuousBatchProcessor(partial(engine_parts, make_harness()))
    device.start()
    device.stop()
    left = weakref.ref(device)
    del device
    gc.collect()
    assert left() is None
