"""The watchdog of the device thread: what counts as a hang, and what becomes of everybody who waits."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from harness import engine_parts, greedy

from mlx_parallm.core.requests import RequestFailed
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.engine.watchdog import LOADING_S, DeviceWatchdog
from mlx_parallm.errors import DeviceHungError

LIMIT_S = 0.2
PATIENCE_S = 30.0


def ticks(watchdog: DeviceWatchdog, most: int = 100) -> int:
    """How many ticks it takes until the thread counts as hung."""
    return next(count for count in range(1, most) if watchdog.tick())


def watchdog(limit_s: float = 8.0) -> DeviceWatchdog:
    return DeviceWatchdog(limit_s, lambda reason, at: None)


def test_work_that_does_not_end_is_a_hang() -> None:
    watched = watchdog()
    watched.begin("decoding")
    assert ticks(watched) == 1 + 8, "it is seen at the first tick, of a second each"
    assert watched.notice == "The device thread seems to hang: decoding has taken 8 s."


def test_neither_rest_nor_much_work_is_a_hang() -> None:
    watched = watchdog()
    for _ in range(100):
        watched.begin("decoding")
        assert not any(watched.tick() for _ in range(8))
    assert watched.notice, "half of the time is over"
    watched.rest()
    assert not any(watched.tick() for _ in range(100))
    assert not watched.notice


def test_a_load_may_take_longer() -> None:
    watched = watchdog()
    watched.begin("loading", LOADING_S)
    assert ticks(watched, most=4000) == 1 + LOADING_S


async def test_whoever_waits_for_a_device_that_hangs_gets_an_error(caplog, monkeypatch) -> None:
    left, released = threading.Event(), threading.Event()

    def build() -> EngineParts:
        parts = engine_parts()
        begin = parts.runner.begin
        monkeypatch.setattr(parts.runner, "begin", lambda *spans: (released.wait(), begin(*spans))[1])
        return parts

    processor = ContinuousBatchProcessor(build, timeout_s=LIMIT_S)
    monkeypatch.setattr("mlx_parallm.engine.watchdog._GRACE_S", 0.0)
    monkeypatch.setattr(processor._watchdog, "leave", left.set)
    await asyncio.to_thread(processor.start)
    events = [event async for event in processor.generate(greedy("r", [3, 1, 4], 8))]
    assert isinstance(events[-1], RequestFailed)
    assert isinstance(events[-1].error, DeviceHungError)
    assert "a prefill has taken" in str(events[-1].error)
    stats = processor.stats()
    with pytest.raises(DeviceHungError, match="a prefill has taken"):
        stats.check_works()
    with pytest.raises(DeviceHungError):
        await processor.run(lambda: None)
    with pytest.raises(DeviceHungError):
        await anext(processor.generate(greedy("late", [3], 1)))
    assert [one.levelno for one in caplog.records] == [logging.CRITICAL]
    assert "in _build" in caplog.text, "the log has the stack of the device thread"
    await asyncio.to_thread(left.wait, PATIENCE_S)
    began = time.monotonic()
    processor.stop(60.0)
    assert time.monotonic() - began < 30, "nobody waits for a thread that hangs"
    released.set()
    processor._thread.join()
    assert not processor.stats().alive, "it came back too late"


async def test_a_start_that_hangs_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr("mlx_parallm.engine.thread.LOADING_S", 0.0)
    released = threading.Event()
    processor = ContinuousBatchProcessor(lambda: (released.wait(), engine_parts())[1], timeout_s=0.05)
    monkeypatch.setattr(processor._watchdog, "leave", lambda: None)
    with pytest.raises(DeviceHungError, match="loading the base model"):
        await asyncio.to_thread(processor.start)
    released.set()
    processor._thread.join()
