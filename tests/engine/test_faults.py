"""A fault costs only its own request; the device thread survives, or says that it did not."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import NoReturn

import mlx.core as mx
import numpy as np
import pytest
from harness import TINY, Harness, assert_same_tokens, engine_parts, greedy, make_harness, running, solo, tokens_in
from lora import QV, layout_of, merged, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.bank import LinearGroup
from mlx_parallm.core.requests import (
    Event,
    GenerationRequest,
    Pooling,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SamplingParams,
    SequenceOutput,
    StopParams,
    WorkClass,
)
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import DeviceMemoryError, EngineDeadError, StepFailedError
from mlx_parallm.kv.arena import Arena

PROMPTS = [[i, 3, 5, 7, 11, 13] * 4 for i in range(3)]


class Fault:
    """Makes the next call of one of the methods of a part of the runner raise."""

    def __init__(
        self, part: object, monkeypatch: pytest.MonkeyPatch, method: str, error: type[Exception] = MemoryError
    ) -> None:
        original = getattr(part, method)
        self.armed = False

        def call(*args: object, **fields: object) -> object:
            if self.armed:
                self.armed = False
                raise error("injected")
            return original(*args, **fields)

        monkeypatch.setattr(part, method, call)


def expected(harness: Harness, index: int, max_tokens: int) -> list[int]:
    return solo(tiny_model("llama"), PROMPTS[index], max_tokens).tokens


@pytest.mark.parametrize(
    ("error", "told"), [(MemoryError, DeviceMemoryError), (RuntimeError, StepFailedError), (TypeError, StepFailedError)]
)
@pytest.mark.parametrize("method", ["begin", "wait", "sample", "read"])
def test_a_failed_decode_step_costs_its_rows_and_nobody_else(
    method: str, error: type[Exception], told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(max_rows=1)
    fault = Fault(harness.runner, monkeypatch, method, error)
    harness.submit("in the step", PROMPTS[0], 30)
    harness.step(4)
    fault.armed = True
    harness.answer("still queued", PROMPTS[1], 10)
    failed = harness.terminal("in the step")
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, told)
    assert harness.tokens("still queued") == expected(harness, 1, 10)
    harness.answer("next", PROMPTS[2], 10)
    assert harness.tokens("next") == expected(harness, 2, 10)
    assert harness.loop.stats().failed_steps_total == 1


def interrupted(harness: Harness, times: int) -> None:
    """So many faults that are of no request, each after the first chunk of a prompt of three."""
    for _ in range(times):
        harness.step()
        with harness.loop.surviving():
            raise TypeError("injected")


@pytest.mark.parametrize("pooling", [None, Pooling.MEAN, Pooling.LAST])
def test_others_faults_may_interrupt_a_request_three_times_before_each_token_or_text(pooling: Pooling | None) -> None:
    harness = make_harness(max_rows=1, max_batched_tokens=64, keep_prefixes=False)
    prompts = [tuple(PROMPTS[i] * 7)[:150] for i in range(2)]
    limits = StopParams(max_tokens=0 if pooling else 8)
    for name in ("often", "too often"):
        asked = prompts if pooling else prompts[:1]
        harness.loop.submit(
            GenerationRequest(name, tuple(asked), SamplingParams(temperature=0.0), limits, pooling=pooling)
        )
        for part in range(2):
            harness.until(lambda name=name, part=part: len(harness.of(name)) == 1 + part)
            interrupted(harness, 3)
        if name == "too often":
            interrupted(harness, 1)
        harness.run()
    finished, failed = harness.terminal("often"), harness.terminal("too often")
    assert isinstance(finished, RequestFinished)
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, StepFailedError)
    if not pooling:
        assert harness.tokens("often") == solo(tiny_model("llama"), prompts[0], 8).tokens


@pytest.mark.parametrize("overwritten", [False, True])
@pytest.mark.parametrize("method", ["fit", "write", "read"])
def test_a_fault_beside_a_version_that_no_file_holds_leaves_it_as_it_is(
    method: str, overwritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row has the same tokens, later requests are served, and it can be saved as it was published. It was trained,
    or its files hold another version by now. The fault comes while another version is staged or saved."""
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(model)
    registry, weights = harness.adapters.registry, random_adapter(layout, 1, targets=QV)
    version = registry.version(harness.publish("a", weights, saved=overwritten))
    other = registry.version(harness.publish("b", random_adapter(layout, 2, targets=QV)))
    if overwritten:
        newer = registry.add("a", replace(version.info, digest="other"))
        harness.wait(harness.adapters.stage(newer, random_adapter(layout, 3, targets=QV)))
    wide = harness.publish("c", random_adapter(layout, 4), staged=False)
    fault = Fault(LinearGroup, monkeypatch, method)
    harness.submit("running", PROMPTS[0], 30, adapter=version.ref)
    harness.step(4)
    fault.armed = True
    if method == "read":
        harness.adapters.extract(other)
    else:
        harness.submit("beside it", PROMPTS[1], 4, adapter=wide)
    harness.run()
    assert not fault.armed
    harness.answer("later", PROMPTS[0], 30, adapter=version.ref)
    reference = solo(merged(tiny_model("llama"), weights), PROMPTS[0], 30)
    for name in ("running", "later"):
        assert_same_tokens(harness.tokens(name), reference, TINY)
    taken = harness.wait(harness.adapters.extract(version))
    assert taken.pairs.keys() == weights.pairs.keys()
    for path, pair in weights.pairs.items():
        assert np.array_equal(taken.pairs[path].a, pair.a)
        assert np.array_equal(taken.pairs[path].b, pair.b)
        assert taken.pairs[path].scale == pair.scale


@pytest.mark.parametrize("steps", range(9))
def test_abort_in_every_phase_frees_everything(steps: int) -> None:
    harness = make_harness(max_rows=2)
    neighbour = PROMPTS[1]
    harness.submit("neighbour", neighbour, 12)
    harness.submit("gone", PROMPTS[0] * 20, 12, n=3)
    harness.step(steps)
    harness.loop.abort("gone")
    harness.loop.check_integrity()
    before = len(harness.of("gone"))
    harness.run()
    assert len(harness.of("gone")) == before, "nothing is said of an aborted request"
    assert harness.tokens("neighbour") == expected(harness, 1, 12)
    assert harness.runner.cache.bytes_used == 0
    assert harness.loop.stats().aborted_total == 1


class Unstartable:
    """A grammar whose state cannot be made."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def start(self) -> NoReturn:
        raise self.error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TypeError("injected"), StepFailedError),
        (RuntimeError("injected"), StepFailedError),
        (RecursionError("injected"), StepFailedError),
        (MemoryError(), DeviceMemoryError),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_a_request_that_cannot_be_opened_fails_alone(error: Exception, told: type[Exception]) -> None:
    """The row beside it is not computed again, and no cached prefix is forgotten."""
    harness = make_harness()
    harness.answer("cached", [7, 9] * 50, 2)
    harness.submit("running", PROMPTS[0], 30)
    harness.step(4)
    assert harness.loop.in_flight
    harness.submit("broken", PROMPTS[1], 30, grammar=Unstartable(error), work_class=WorkClass.TRAINING)
    harness.answer("next", [7, 9] * 50, 2)
    failed = harness.terminal("broken")
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, told)
    assert harness.tokens("running") == expected(harness, 0, 30)
    assert harness.cached("next") > 64
    stats = harness.loop.stats()
    assert (stats.failed_steps_total, stats.preemptions_total) == (0, 0)


def fails_once_done(harness: Harness, monkeypatch: pytest.MonkeyPatch, path: str, error: Exception) -> None:
    """Makes the next call of a method of the engine raise when it has done its work."""
    part = operator.attrgetter(path.rpartition(".")[0])(harness.loop)
    name, errors = path.rpartition(".")[2], [error]
    original = getattr(part, name)

    def failing(*args: object, **fields: object) -> object:
        done = original(*args, **fields)
        if errors:
            raise errors.pop()
        return done

    monkeypatch.setattr(part, name, failing)


@pytest.mark.parametrize(("error", "lost"), [(RuntimeError("injected"), False), (TypeError("injected"), True)])
def test_a_request_ends_though_its_fault_is_beside_that_of_a_unit_in_flight(
    error: Exception, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only sequence has ended when its call fails, so it cannot start again. The error may be that of the unit in
    flight, or the unit is `lost` with an error of its own."""
    harness = make_harness()
    harness.submit("running", PROMPTS[0], 30)
    harness.step(4)
    fails_once_done(harness, monkeypatch, "scheduler.finish", error)
    Fault(harness.runner, monkeypatch, "wait", RuntimeError).armed = lost
    harness.submit("without tokens", PROMPTS[1], 0)
    harness.answer("next", PROMPTS[2], 10)
    assert isinstance(harness.terminal("without tokens"), RequestFailed)
    assert isinstance(harness.terminal("running"), RequestFailed), "it may have been its error"
    assert harness.tokens("next") == expected(harness, 2, 10)


def test_a_fault_of_an_abort_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a sequence that waits for a row, beside a unit in flight whose error it may have been."""
    harness = make_harness(max_rows=2)
    harness.submit("running", PROMPTS[0], 30)
    harness.submit("gone", PROMPTS[1] * 20, 30, n=2)
    harness.step(4)
    fails_once_done(harness, monkeypatch, "runner.cache.close", RuntimeError("injected"))
    harness.loop.abort("gone")
    harness.answer("next", PROMPTS[2], 10)
    assert harness.tokens("next") == expected(harness, 2, 10)
    assert harness.loop.stats().waiting == 0


@pytest.mark.parametrize("path", ["adapters.pin", "loop.scheduler._waiting.remove"])
def test_a_row_that_is_not_counted_yet_is_given_back(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it has tokens already, which the prefix cache had, and whether or not its adapter's slot is pinned."""
    model = tiny_model("llama")
    weights = random_adapter(layout_of(model), 1)
    harness = make_harness(model, slots=1)
    first, second = (harness.publish(name, weights, staged=False) for name in "ab")
    whole = harness.answer("whole", PROMPTS[0] * 6, 4, adapter=first)
    part, _, name = path.rpartition(".")
    Fault(operator.attrgetter(part)(harness), monkeypatch, name).armed = True
    harness.submit("disturbed", PROMPTS[0] * 6, 4, adapter=first)
    harness.answer("beside", PROMPTS[0] * 6, 4, adapter=first)
    if path == "adapters.pin":
        failed = harness.terminal("disturbed")
        assert isinstance(failed, RequestFailed)
        assert isinstance(failed.error, DeviceMemoryError)
    else:
        assert harness.tokens("disturbed") == whole, "no request's call failed"
    assert harness.tokens("beside") == whole
    assert harness.answer("other", PROMPTS[0] * 6, 4, adapter=second) == whole, "the only slot is free again"


# ---- the thread ---------------------------------------------------------------------------------


class BrokenCost(CostModel):
    """Cannot say how much of a prompt to compute, so no unit can be chosen as long as a prompt waits."""

    def chunk_seconds(self, chunk: object) -> float:
        raise AttributeError("injected")

    tokens_within = chunk_seconds  # type: ignore[assignment]


@pytest.fixture
async def engine() -> AsyncIterator[ContinuousBatchProcessor]:
    async with running() as processor:
        yield processor


async def collect(engine: ContinuousBatchProcessor, asked: GenerationRequest) -> list[Event]:
    return [event async for event in engine.generate(asked)]


async def until(condition: object, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_closing_the_iterator_aborts(engine: ContinuousBatchProcessor) -> None:
    stream = engine.generate(greedy("long", PROMPTS[0], 3000))
    assert [type(await anext(stream)) for _ in range(2)] == [RequestStarted, SequenceOutput]
    await stream.aclose()
    await until(lambda: engine.stats().aborted_total == 1 and engine.stats().running == 0)
    assert engine.stats().kv_bytes_held == 0


async def test_a_dead_device_thread_fails_its_requests_and_says_so() -> None:
    processor = ContinuousBatchProcessor(lambda: engine_parts(cost=BrokenCost(0.01, 1e-4, 1e-8)))
    await asyncio.to_thread(processor.start)
    events = await collect(processor, greedy("x", PROMPTS[0], 5))
    assert isinstance(events[-1], RequestFailed)
    assert isinstance(events[-1].error, EngineDeadError)
    await until(lambda: not processor.stats().alive)
    with pytest.raises(EngineDeadError):
        await collect(processor, greedy("y", PROMPTS[0], 5))


async def test_stopping_fails_what_still_runs() -> None:
    processor = ContinuousBatchProcessor(engine_parts)
    await asyncio.to_thread(processor.start)
    stream = processor.generate(greedy("long", PROMPTS[0], 3000))
    await anext(stream)
    await asyncio.to_thread(processor.stop)
    async with asyncio.timeout(30):
        rest = [event async for event in stream]
    assert isinstance(rest[-1], RequestFailed)


# ---- out of memory, through the asyncio face -------------------------------------------------------


def limit_blocks(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The device has no memory for more blocks than this."""
    resize = Arena.resize

    def limited(arena: Arena, blocks: int, *args: float) -> bool:
        if blocks > most:
            raise RuntimeError("[metal::malloc] Unable to allocate 1073741824 bytes.")
        return resize(arena, blocks, *args)

    monkeypatch.setattr(Arena, "resize", limited)


async def test_a_prompt_that_cannot_get_memory_fails_alone(
    engine: ContinuousBatchProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a row that ends undisturbed; it waits for that row's memory first."""
    limit_blocks(monkeypatch, most=3)
    ended: list[str] = []

    async def ask(asked: GenerationRequest) -> list[Event]:
        events = await collect(engine, asked)
        ended.append(asked.request_id)
        return events

    short, long = await asyncio.gather(ask(greedy("short", PROMPTS[0], 30)), ask(greedy("long", PROMPTS[1] * 10, 4)))
    assert ended == ["short", "long"], "it waited for the row beside it"
    assert isinstance(long[-1], RequestFailed)
    assert isinstance(long[-1].error, DeviceMemoryError)
    assert tokens_in(short) == solo(tiny_model("llama"), PROMPTS[0], 30).tokens
    stats = engine.stats()
    assert (stats.alive, stats.preemptions_total) == (True, 0)
    monkeypatch.undo()
    served = await collect(engine, greedy("again", PROMPTS[1] * 10, 4))
    assert isinstance(served[-1], RequestFinished)


async def test_a_snapshot_that_fails_costs_nobody(
    engine: ContinuousBatchProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the device may surface where only figures are asked for."""
    figures, calls = mx.get_active_memory, iter(range(1 << 30))

    def failing() -> int:
        if next(calls) < 3:
            raise RuntimeError("[metal::malloc] injected")
        return figures()

    monkeypatch.setattr(mx, "get_active_memory", failing)
    events = await collect(engine, greedy("r", PROMPTS[0], 30))
    assert tokens_in(events) == solo(tiny_model("llama"), PROMPTS[0], 30).tokens
    assert engine.stats().alive


async def test_a_device_that_is_lost_ends_the_thread_and_fails_what_runs(
    engine: ContinuousBatchProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("[METAL] Command buffer execution failed")

    stream = engine.generate(greedy("r", PROMPTS[0], 3000))
    await anext(stream)
    monkeypatch.setattr("mlx_parallm.engine.faults.check_device", lost)
    monkeypatch.setattr(mx, "get_active_memory", lost)
    rest = [event async for event in stream]
    assert isinstance(rest[-1], RequestFailed)
    await until(lambda: not engine.stats().alive)
    with pytest.raises(EngineDeadError):
        await collect(engine, greedy("s", PROMPTS[0], 3))
