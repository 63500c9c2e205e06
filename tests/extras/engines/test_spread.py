"""Samples that are drawn from several engines at once."""

import asyncio

import pytest

from mlx_parallm.core.requests import GenerationRequest, RequestFinished, SamplingParams, SequenceOutput, StopParams
from mlx_parallm.errors import EngineError
from mlx_parallm.extras.engines import spread
from mlx_parallm.extras.engines.spread import SpreadEngine

ANSWER = (SequenceOutput(0, (5,), "a"), RequestFinished(1, 1, 0, 0, 0, 1))


class Drawer:
    """An engine that fails `failures` times, or while it is `down`."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.drawn, self.asked, self.closed = failures, 0, 0, False
        self.hold = asyncio.Event()
        self.hold.set()

    async def open(self, adapter):
        self.adapter = adapter

    async def generate(self, request):
        self.asked += 1
        await self.hold.wait()
        if self.failures > 0:
            self.failures -= 1
            raise EngineError("it is down")
        self.drawn += 1
        for event in ANSWER:
            yield event

    async def close(self):
        self.closed = True


def request(number: int, tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(f"r{number}", ((1, 2),), SamplingParams(), StopParams(tokens))


async def draw(engine, number=0, tokens=8):
    return tuple([event async for event in engine.generate(request(number, tokens))])


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(spread, "_AGAIN_S", 0.001)


async def test_what_fails_is_drawn_elsewhere_and_an_engine_that_fails_is_asked_last():
    bad, good = Drawer(failures=1), Drawer()
    engine = SpreadEngine([bad, good], 1)
    assert await draw(engine) == ANSWER
    for number in range(4):
        assert await draw(engine, number) == ANSWER
    assert (bad.asked, good.drawn) == (1, 5)


async def test_while_all_fail_it_tries_again_and_gives_up_in_the_end():
    one, two = Drawer(failures=3), Drawer(failures=3)
    assert await draw(SpreadEngine([one, two], 10)) == ANSWER
    with pytest.raises(EngineError, match="it is down"):
        await draw(SpreadEngine([Drawer(failures=10**9)], 0.01))
