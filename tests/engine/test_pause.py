"""The engine paused: requests fail, end or stand still, later ones wait, and no token is another one for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from harness import greedy, running, solo
from tiny import tiny_model

from mlx_parallm.core.device import PauseMode
from mlx_parallm.core.requests import GenerationRequest, SequenceOutput
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import AbortedError

PROMPT = [3, 1, 4, 1, 5]
LONG = 200


@pytest.fixture
async def engine() -> AsyncIterator[ContinuousBatchProcessor]:
    async with running() as processor:
        yield processor


class Asking:
    """A request under way: `tokens` so far; `done` is its task."""

    def __init__(self, engine: ContinuousBatchProcessor, name: str, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.done = asyncio.create_task(self._read(engine, greedy(name, PROMPT, max_tokens)))

    async def _read(self, engine: ContinuousBatchProcessor, asked: GenerationRequest) -> list[int]:
        async for event in engine.generate(asked):
            if isinstance(event, SequenceOutput):
                self.tokens += event.token_ids
            elif error := getattr(event, "error", None):
                raise error
        return self.tokens

    async def under_way(self) -> Asking:
        while not self.tokens:
            await asyncio.sleep(0.001)
        assert not self.done.done()
        return self


async def stands_still(asking: Asking) -> bool:
    await asyncio.sleep(0.05)  # what was told before the pause arrives
    before = len(asking.tokens)
    await asyncio.sleep(0.2)
    return len(asking.tokens) == before and not asking.done.done()


async def test_kept_a_request_stands_still_and_goes_on_to_the_same_end(engine: ContinuousBatchProcessor) -> None:
    expected = solo(tiny_model("llama"), PROMPT, LONG).tokens
    asked = await Asking(engine, "r", LONG).under_way()
    await engine.pause(PauseMode.KEEP)
    later = Asking(engine, "later", 5)
    assert engine.stats().paused
    assert await stands_still(asked)
    assert not later.tokens
    await engine.resume()
    assert not engine.stats().paused
    assert await asked.done == expected
    assert await later.done == expected[:5]


async def test_waited_for_a_request_ends_and_a_later_one_is_held(engine: ContinuousBatchProcessor) -> None:
    asked = await Asking(engine, "r", LONG).under_way()
    await engine.pause(PauseMode.WAIT)
    assert len(asked.done.result()) == LONG
    later = Asking(engine, "later", 5)
    assert await stands_still(later)
    assert engine.stats().waiting == 1
    await engine.resume()
    assert len(await later.done) == 5


async def test_aborted_requests_fail_and_later_ones_are_held(engine: ContinuousBatchProcessor) -> None:
    asked = await Asking(engine, "r", LONG).under_way()
    await engine.pause(PauseMode.ABORT)
    with pytest.raises(AbortedError):
        await asked.done
    assert (engine.stats().running, engine.stats().kv_bytes_held) == (0, 0)
    later = Asking(engine, "later", 5)
    assert await stands_still(later)
    await engine.pause(PauseMode.ABORT)
    with pytest.raises(AbortedError):
        await later.done
    await engine.resume()
    assert len(await Asking(engine, "next", 5).done) == 5


@pytest.mark.parametrize("instead", ["resume", "keep"])
async def test_a_wait_ends_when_something_else_takes_its_place(engine: ContinuousBatchProcessor, instead: str) -> None:
    asked = await Asking(engine, "r", LONG).under_way()
    await engine.pause(PauseMode.KEEP)
    waiting = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    await (engine.resume() if instead == "resume" else engine.pause(PauseMode.KEEP))
    await asyncio.wait_for(waiting, 30)
    await engine.resume()
    assert len(await asked.done) == LONG


async def test_who_leaves_while_paused_leaves_nothing_behind(engine: ContinuousBatchProcessor) -> None:
    asked = await Asking(engine, "r", LONG).under_way()
    await engine.pause(PauseMode.KEEP)
    later = Asking(engine, "later", 5)
    await asyncio.sleep(0.02)
    for asking in (asked, later):
        asking.done.cancel()
    await asyncio.wait([asked.done, later.done])
    await engine.resume()  # after the aborts in the inbox
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_bytes_held) == (0, 0, 0)
