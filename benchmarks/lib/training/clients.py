"""Clients that send requests without a pause, and updates without a pause, for a server that trains."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.lib.load import REQUEST_LIMIT_S, Stream
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.throughput import body
from benchmarks.lib.training import batch as rl_batch

TOKENS, PROMPTS = 64, 16
AT_ONCE = 2
"""Updates that are posted at the same time: one runs, one waits."""
TICK_S = 0.02
RETRY_S = 0.2


class Clients:
    """`count` clients, each sending its next request when its last one has ended. Every token is an event."""

    def __init__(self, port: int, count: int) -> None:
        self.streams: list[Stream] = []
        self.errors: list[str] = []
        self._port = port
        self._count = count

    async def run(self) -> None:
        """Runs the clients until cancelled."""
        await asyncio.gather(*(self._client(number) for number in range(self._count)))

    def tokens(self, begin: float, end: float) -> int:
        """Number of tokens that arrived in the interval."""
        return sum(begin < arrival <= end for stream in self.streams for arrival in stream.arrivals)

    def gaps(self, begin: float, end: float) -> Iterator[float]:
        """Seconds between two tokens of one answer, for gaps that ended in the interval."""
        pairs = (pair for stream in self.streams for pair in pairwise(stream.arrivals))
        return (after - before for before, after in pairs if begin < after <= end)

    def first_tokens(self, begin: float, end: float) -> Iterator[float]:
        """Seconds from a request to its first token, for those that came in the interval."""
        begun = (stream for stream in self.streams if stream.arrivals)
        return (stream.first_token_s for stream in begun if begin < stream.arrivals[0] <= end)

    async def _client(self, number: int) -> None:
        for prompt in itertools.cycle(short_prompts(PROMPTS, f"serve and train {number}")):
            stream = Stream(self._port, _body(prompt, seed=len(self.streams)))
            self.streams.append(stream)
            try:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    await stream.run()
            except OSError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(RETRY_S)


class Updates:
    """Updates of a server's default adapter. `ended`: the `time.perf_counter` time at which each version was live."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.ended: list[float] = []
        self.metrics: list[dict[str, Any]] = []
        self._http = http
        self._posted = 0
        self._wanted = False

    async def one(self) -> None:
        """Makes one update. Raises RuntimeError if its version did not go live."""
        self._posted += 1
        answer = (await self._http.post("/v1/training/update", json=rl_batch.body(self._posted))).raise_for_status()
        if (update := answer.json())["status"] != "published":
            raise RuntimeError(f"an update was {update['status']}: {update['reason']}")
        self.ended.append(time.perf_counter())
        self.metrics.append(update["metrics"])

    @asynccontextmanager
    async def queued(self) -> AsyncIterator[None]:
        """Keeps updates waiting while the block runs. At the end of the block, waits for the last ones."""
        self._wanted = True
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._post())
            yield
            self._wanted = False

    async def next_end(self) -> None:
        """Waits for the end of the next update; returns at once outside of `queued`."""
        ended = len(self.ended)
        while self._wanted and len(self.ended) == ended:
            await asyncio.sleep(TICK_S)

    async def _post(self) -> None:
        while self._wanted:
            await self.one()


def _body(prompt: str, seed: int) -> dict[str, Any]:
    more = {"temperature": 1, "seed": seed, "ignore_eos": True, "return_token_ids": True}
    return {**body(prompt, TOKENS), **more}
