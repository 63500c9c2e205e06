"""Responses that take long: how their objects become bytes, how a silent one stays open, and what ends one early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.errors import DrainingError

PING_INTERVAL_S = 15.0
"""Longest silence of a stream, in seconds, before an event or a comment is sent to keep the connection open."""
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Framing:
    """One form of a stream.

    Attributes:
        content_type: the header of the response.
        write: the text of one object.
        comment: the text that keeps a silent stream open and that clients skip. Empty: the form has none.
        end: the last text of the stream.
    """

    content_type: str
    write: Callable[[WireOutput], str]
    comment: str = ""
    end: str = ""


def sent_event(json: str, kind: str = "", event_id: str = "") -> str:
    """A server-sent event. Those of a stream may have kinds and ids."""
    name = f"event: {kind}\n" if kind else ""
    last = f"id: {event_id}\n" if event_id else ""
    return f"{last}{name}data: {json}\n\n"


def _event(data: WireOutput) -> str:
    return sent_event(data.json_text(), data.event_name)


def _line(data: WireOutput) -> str:
    return f"{data.json_text()}\n"


EVENTS = Framing("text/event-stream; charset=utf-8", _event, comment=": ping\n\n")
OPENAI_EVENTS = replace(EVENTS, end="data: [DONE]\n\n")
"""The events of OpenAI's completions, whose streams end with a word."""
JSON_LINES = Framing("application/x-ndjson", _line)


class EventStream:
    """The objects of one streamed response. `headers` are sent in addition to the stream's own. `keep_alive`: see
    `AnswerWriter`."""

    def __init__(
        self,
        send: Send,
        headers: Mapping[str, str],
        framing: Framing = EVENTS,
        keep_alive: Callable[[], WireOutput | None] = lambda: None,
    ) -> None:
        self._send = send
        self._framing = framing
        self._keep_alive = keep_alive
        every = {"content-type": framing.content_type, **_STREAM_HEADERS, **headers}
        self._headers = [(name.encode(), value.encode()) for name, value in every.items()]
        self._last_sent = 0.0
        self._pings: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Sends the headers. While the block runs, what keeps the connection open is sent after each `PING_INTERVAL_S`
        of silence."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._last_sent = time.monotonic()
        self._pings = asyncio.create_task(self._ping(PING_INTERVAL_S))
        try:
            yield
        finally:
            self._pings.cancel()
            await asyncio.gather(self._pings, return_exceptions=True)  # whoever writes the stream meets the error too

    async def event(self, data: WireOutput) -> None:
        """Sends one object."""
        await self.write(self._framing.write(data))

    async def end(self) -> None:
        """Ends the stream."""
        await self.write(self._framing.end, last=True)

    async def write(self, text: str, last: bool = False) -> None:
        """Sends what the framing has written. `last`: it is the end of the stream, after which nothing may be sent."""
        if last and self._pings is not None:
            self._pings.cancel()
        self._last_sent = time.monotonic()
        await self._send({"type": "http.response.body", "body": text.encode("utf-8"), "more_body": not last})

    async def _ping(self, interval_s: float) -> None:
        while self._framing.comment:
            silent = time.monotonic() - self._last_sent
            if silent < interval_s:
                await asyncio.sleep(interval_s - silent)
            elif (event := self._keep_alive()) is not None:
                await self.event(event)
            else:
                await self.write(self._framing.comment)


@asynccontextmanager
async def while_connected(receive: Receive, stop: asyncio.Event) -> AsyncIterator[None]:
    """Cancels the block when the client disconnects or `stop` is set. The request's body must have been read before.

    Raises:
        ClientDisconnect: the client closed the connection.
        DrainingError: `stop` was set.
    """
    causes: list[Exception] = []

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel(ClientDisconnect())

    async def stopped() -> None:
        await stop.wait()
        cancel(DrainingError("draining"))

    def cancel(cause: Exception) -> None:
        if not causes:
            causes.append(cause)
            block.reschedule(0)  # a time in the past

    try:
        async with asyncio.timeout(None) as block:
            watchers = [asyncio.create_task(watch()) for watch in (disconnected, stopped)]
            try:
                yield
            finally:
                for watcher in watchers:
                    watcher.cancel()
    except TimeoutError:
        if block.expired():
            raise causes[0] from None
        raise
