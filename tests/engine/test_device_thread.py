"""`run`: calls from the event loop on the thread that owns MLX, between two units."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Generator
from concurrent.futures import Future
from functools import partial

import mlx.core as mx
import pytest
from harness import engine_parts, greedy, make_harness, running, solo, tokens_in
from tiny import tiny_model

from mlx_parallm.batch.runner import BatchRunner, Pending
from mlx_parallm.core.device import DeviceSchedule, completed, then
from mlx_parallm.core.machine import MachineState, Relief
from mlx_parallm.core.requests import RequestFailed
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import EngineDeadError, RankLostError

PROMPT = [3, 1, 4, 1, 5]


class Countdown:
    """Training of so many micro-steps, then `future` gets their number."""

    def __init__(self) -> None:
        self.left = self.done = 0

    def begin(self, micro_steps: int) -> Future[int]:
        self.left, self.future = micro_steps, Future[int]()
        return self.future

    def waits(self) -> bool:
        return self.left > 0

    def advance(self) -> None:
        self.left -= 1
        self.done += 1
        if self.left == 0:
            self.future.set_result(self.done)

    def reset(self) -> None:
        raise AssertionError("nothing fails here")

    bytes_held = bytes_of_updates = peak_bytes = 0

    def pace(self, seconds: float) -> None:
        """Its units take no time."""


@pytest.fixture
def training() -> Countdown:
    return Countdown()


@pytest.fixture
async def engine(training: Countdown) -> AsyncIterator[ContinuousBatchProcessor]:
    async with running(lambda: engine_parts(training=training)) as processor:
        yield processor


async def generate(engine: ContinuousBatchProcessor, request_id: str, max_tokens: int = 30) -> list[int]:
    return tokens_in([event async for event in engine.generate(greedy(request_id, PROMPT, max_tokens))])


async def test_it_runs_on_the_device_thread_and_returns_the_result(engine: ContinuousBatchProcessor) -> None:
    assert await engine.run(lambda: threading.current_thread().name) == "device"


async def test_a_future_is_waited_for_beside_requests(engine: ContinuousBatchProcessor, training: Countdown) -> None:
    """Training that is begun so wakes an idle loop, and runs to its end."""
    expected = solo(tiny_model("llama"), PROMPT, 30).tokens
    assert await engine.run(lambda: training.begin(5)) == 5
    learnt, *said = await asyncio.gather(
        engine.run(lambda: training.begin(5)), *(generate(engine, str(i)) for i in range(4))
    )
    assert learnt == 10
    assert said == [expected] * 4


async def test_many_at_once_each_get_their_own(engine: ContinuousBatchProcessor) -> None:
    answers = await asyncio.gather(*(engine.run(lambda i=i: i) for i in range(20)))
    assert answers == list(range(20))


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


async def test_a_rank_that_a_pass_finds_lost_is_named_to_whoever_waits(
    engine: ContinuousBatchProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: BatchRunner, _pending: Pending) -> None:
        raise RankLostError("rank 1 is lost")

    monkeypatch.setattr(BatchRunner, "sample", fail)
    events = engine.generate(greedy("running", PROMPT, 30))
    (failed,) = [event async for event in events if isinstance(event, RequestFailed)]
    assert "rank 1 is lost" in str(failed.error)
    with pytest.raises(RankLostError, match="rank 1 is lost"):
        await generate(engine, "late")


async def test_speed_that_is_forgotten_is_measured_by_the_next_unit_alone(engine: ContinuousBatchProcessor) -> None:
    """A prediction that is a billion times too high is right again after one unit."""
    (cost,) = (each.scheduler.cost for each in engine._engines.values())
    await engine.run(lambda: setattr(cost, "scale", 1e9))
    engine.forget_speed()
    await generate(engine, "r", 1)
    assert await engine.run(lambda: cost.scale) < 1e6


async def test_a_new_schedule_is_in_force_when_it_returns(engine: ContinuousBatchProcessor) -> None:
    schedule = DeviceSchedule(training_time_share=0.5, max_decode_stall_s=0.2)
    await engine.reschedule(schedule)
    assert engine.stats().schedule == schedule


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


async def test_a_stopped_thread_cannot_sleep_or_be_rescheduled_or_forget(engine: ContinuousBatchProcessor) -> None:
    await asyncio.to_thread(engine.stop)
    with pytest.raises(EngineDeadError):
        await engine.sleep()
    with pytest.raises(EngineDeadError):
        await engine.reschedule(DeviceSchedule())
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()


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


async def test_a_base_model_that_is_loaded_while_memory_is_short_keeps_no_prefixes_either() -> None:
    first, second = make_harness(), make_harness()
    device = ContinuousBatchProcessor(lambda: pytest.fail("it is not started"))
    device._add(engine_parts(first, base="first"))
    device._control(lambda engine: engine.relieve(Relief.PREFIXES), relief=Relief.PREFIXES)
    done = device._load(loading(engine_parts(second, base="second")))
    while not done.done():
        device._fair_share.step()
    assert not any(each.runner.cache.device.keeps_prefixes for each in (first, second))
    device._control(lambda engine: engine.relieve(Relief.NONE), relief=Relief.NONE)
    assert all(each.runner.cache.device.keeps_prefixes for each in (first, second))


def test_an_engine_that_was_stopped_leaves_its_memory() -> None:
    """A program may start one engine after another, and each has a model."""
    device = ContinuousBatchProcessor(partial(engine_parts, make_harness()))
    device.start()
    device.stop()
    left = weakref.ref(device)
    del device
    gc.collect()
    assert left() is None


def loading(parts: EngineParts) -> Generator[None, None, EngineParts]:
    yield
    return parts
