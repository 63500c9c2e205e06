"""Server-sent events, byte for byte as OpenAI sends them: `data: {json}`, at the end `data: [DONE]`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.types import Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """One response's stream of events; `headers` go out beside the stream's own."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._last_sent = 0.0

    @asynccontextmanager
    async def opened(self, ping_interval_s: float) -> AsyncIterator[None]:
        """Sends the headers; while the block runs, a comment goes out whenever nothing else did for that long."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._last_sent = time.monotonic()
        pings = asyncio.create_task(self._ping(ping_interval_s))
        try:
            yield
        finally:
            pings.cancel()

    async def event(self, json: str, kind: str = "") -> None:
        """`kind`, where there are several, goes out as the event's name."""
        name = f"event: {kind}\n" if kind else ""
        await self._write(f"{name}data: {json}\n\n")

    async def done(self) -> None:
        await self._write("data: [DONE]\n\n", last=True)

    async def end(self) -> None:
        """The end of a stream whose last event says that it is the last: nothing more is said."""
        await self._write("", last=True)

    async def _write(self, text: str, last: bool = False) -> None:
        self._last_sent = time.monotonic()
        await self._send({"type": "http.response.body", "body": text.encode("utf-8"), "more_body": not last})

    async def _ping(self, interval_s: float) -> None:
        while True:
            silent = time.monotonic() - self._last_sent
            await asyncio.sleep(interval_s - silent) if silent < interval_s else await self._write(": ping\n\n")
