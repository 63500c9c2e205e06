"""Clients that never pause, and updates that never run out: what a server that trains is measured with."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import rl_batch
from load import REQUEST_LIMIT_S, Stream
from prompts import short_prompts
from throughput import body

TOKENS, PROMPTS = 64, 16
AT_ONCE = 2
"""Updates posted together: one is made, one waits for it."""
TICK_S = 0.02
RETRY_S = 0.2


class Clients:
    """So many, each sending its next request when its last one has ended. Every token is an event."""

    def __init__(self, port: int, count: int) -> None:
        self.streams: list[Stream] = []
        self.errors: list[str] = []
        self._port = port
        self._count = count

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(*(self._client(number) for number in range(self._count)))

    def tokens(self, begin: float, end: float) -> int:
        """That arrived in the interval."""
        return sum(begin < arrival <= end for stream in self.streams for arrival in stream.arrivals)

    def gaps(self, begin: float, end: float) -> Iterator[float]:
        """Seconds between two tokens of one answer, of those that ended in the interval."""
        pairs = (pair for stream in self.streams for pair in pairwise(stream.arrivals))
        return (after - before for before, after in pairs if begin < after <= end)

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
    """Updates of a server's default adapter. `ended`: when each was live, by `time.perf_counter`."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.ended: list[float] = []
        self.metrics: list[dict[str, Any]] = []
        self._http = http
        self._posted = 0
        self._wanted = False

    async def one(self) -> None:
        """Raises RuntimeError: it did not go live."""
        self._posted += 1
        answer = (await self._http.post("/v1/training/update", json=rl_batch.body(self._posted))).raise_for_status()
        if (update := answer.json())["status"] != "published":
            raise RuntimeError(f"an update was {update['status']}: {update['reason']}")
        self.ended.append(time.perf_counter())
        self.metrics.append(update["metrics"])

    @asynccontextmanager
    async def queued(self) -> AsyncIterator[None]:
        """While the block runs there is always one to make, and after it none: the last ones are seen through."""
        self._wanted = True
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._post())
            yield
            self._wanted = False

    async def next_end(self) -> None:
        """Where none is wanted, at once."""
        ended = len(self.ended)
        while self._wanted and len(self.ended) == ended:
            await asyncio.sleep(TICK_S)

    async def _post(self) -> None:
        while self._wanted:
            await self.one()


def _body(prompt: str, seed: int) -> dict[str, Any]:
    more = {"temperature": 1, "seed": seed, "ignore_eos": True, "return_token_ids": True}
    return {**body(prompt, TOKENS), **more}
