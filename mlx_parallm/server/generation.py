"""The life of one generation request, from its place in the queue to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.core import (
    AdapterRef,
    CollectionSpec,
    Event,
    GenerationRequest,
    PromptScored,
    RequestFailed,
    RequestFinished,
    SequenceOutput,
)
from mlx_parallm.errors import EngineError, ParaLLMError
from mlx_parallm.server.api.answer import AnswerWriter, adapter_of
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.generation_fields import GenerationBody
from mlx_parallm.server.errors import code_of
from mlx_parallm.server.http.request_log import LORA_ADAPTER, RequestRecord, record_of
from mlx_parallm.server.http.workers import client_of
from mlx_parallm.server.lifecycle import while_connected
from mlx_parallm.server.metrics import RequestObserver
from mlx_parallm.server.planning import select_adapter
from mlx_parallm.server.services import Services

log = logging.getLogger(__name__)

PING_INTERVAL_S = 15.0
"""Longest silence of a stream, in seconds, before a comment is sent to keep the connection open."""
_BYTES_PER_EVENT, _BYTES_PER_LOGPROB = 32, 64
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """The server-sent events of one response. `headers` are sent beside the stream's own."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = [*_SSE_HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._last_sent = 0.0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Sends the headers. In the block, a comment is sent after each `PING_INTERVAL_S` of silence."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._last_sent = time.monotonic()
        pings = asyncio.create_task(self._ping(PING_INTERVAL_S))
        try:
            yield
        finally:
            pings.cancel()

    async def event(self, json: str, kind: str = "") -> None:
        """Sends one event. `kind` is its `event` field, for streams with events of several kinds."""
        name = f"event: {kind}\n" if kind else ""
        await self._write(f"{name}data: {json}\n\n")

    async def end(self, done: bool = False) -> None:
        """Ends the stream; with `done`, by `data: [DONE]` as OpenAI's completions do."""
        await self._write("data: [DONE]\n\n" if done else "", last=True)

    async def _write(self, text: str, last: bool = False) -> None:
        self._last_sent = time.monotonic()
        await self._send({"type": "http.response.body", "body": text.encode("utf-8"), "more_body": not last})

    async def _ping(self, interval_s: float) -> None:
        while True:
            silent = time.monotonic() - self._last_sent
            await asyncio.sleep(interval_s - silent) if silent < interval_s else await self._write(": ping\n\n")


class GenerationResponse(Response):
    """Reserves places in the queue, leases the adapter, prepares the request, generates, and sends the answer.

    All of this happens in `__call__`, so one block bounds the request's life: its places in the queue, its adapter
    version and its rows are released when the block ends, for whatever reason.

    Args:
        prompts: the number of prompts, each of which is answered `body.n` times.
        prepare: renders, tokenises and compiles the grammar. It runs in a worker thread.
    """

    def __init__(
        self,
        services: Services,
        body: GenerationBody,
        prompts: int,
        prepare: Callable[[AdapterRef, CollectionSpec | None], AnswerWriter],
    ) -> None:
        super().__init__()
        self._services = services
        self._body = body
        self._prepare = prepare
        self._prompts = prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, services = record_of(scope), self._services
        selector = select_adapter(self._body, services.model_names)
        sequences = services.check_sequences(self._prompts, self._body.n)
        record.set_model(selector.name or services.card.name)
        async with services.admit(sequences, selector) as adapter:
            writer = await self._prepared(scope, adapter)
            record.set_request(writer.request)
            send_answer = self._send_events if self._body.stream else self._send_whole
            try:
                await send_answer(writer, scope, receive, send)
            except ClientDisconnect:
                record.disconnected = True
                services.metrics.client_disconnects.inc()

    async def _prepared(self, scope: Scope, adapter: AdapterRef) -> AnswerWriter:
        body, workers, client = self._body, self._services.workers, client_of(scope)
        collection = None
        if body.collect_trajectory:
            collection = CollectionSpec(body.scoring_function, body.metadata or {}, client)
            training = self._services.require_training("collect_trajectory")
            collection = await training.check(collection, adapter)
        prepare = partial(self._prepare, adapter, collection)
        if body.compiles:
            return await workers.compile(client, prepare)
        return await workers.run(Request(scope).state.body_bytes, prepare)

    async def _send_whole(self, writer: AnswerWriter, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._all_events(writer.request, record_of(scope))
        events = await while_connected(work, receive, self._services.lifecycle.expired)
        body = await self._services.workers.run(_answer_bytes(events), partial(_json, writer, events))
        await Response(body, headers=_headers(writer.request), media_type="application/json")(scope, receive, send)

    async def _all_events(self, request: GenerationRequest, record: RequestRecord) -> list[Event]:
        async with aclosing(generate(self._services, request, record)) as events:
            return [event async for event in events]

    async def _send_events(self, writer: AnswerWriter, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        stream = EventStream(send, _headers(writer.request))
        async with stream.opened():
            try:
                await while_connected(self._relay(writer, stream, record), receive, self._services.lifecycle.expired)
            except ClientDisconnect:
                raise
            except Exception as error:  # the status line has been sent, so the stream has to carry the error
                if not isinstance(error, ParaLLMError):
                    log.exception("a stream failed")
                record.error = code_of(error)
                await _send_chunk(stream, writer.failed(error))
            await stream.end(writer.ENDS_WITH_DONE)

    async def _relay(self, writer: AnswerWriter, stream: EventStream, record: RequestRecord) -> None:
        for chunk in writer.opening_chunks():
            await _send_chunk(stream, chunk)
        async with aclosing(generate(self._services, writer.request, record)) as events:
            async for event in events:
                for chunk in writer.chunks(event):
                    await _send_chunk(stream, chunk)


async def generate(
    services: Services, request: GenerationRequest, record: RequestRecord
) -> AsyncGenerator[Event, None]:
    """The engine's events, which are also counted in the metrics and in `record`. The last one is RequestFinished.
    Closing the generator aborts the request.

    Raises:
        the error of a RequestFailed, or EngineError if the engine ended without a terminal event.
    """
    with RequestObserver(services.metrics, request) as observer:
        events = services.engine.generate(request)
        if request.collection is not None:
            events = services.require_training().collect(request, events)
        # `EngineClient` and `TrainingClient` promise that these iterators have `aclose`.
        async with aclosing(cast(AsyncGenerator[Event, None], events)):
            async for event in events:
                if isinstance(event, RequestFailed):
                    raise event.error
                observer.observe(event)
                record.observe(event)
                yield event
                if isinstance(event, RequestFinished):
                    return
        raise EngineError("the engine ended a request without a terminal event")


def _json(writer: AnswerWriter, events: Sequence[Event]) -> bytes:
    """The whole answer as JSON, for a worker thread, because logprobs make it long. It is written in short pieces, as
    each of them is written under the interpreter lock."""
    return "".join(writer.whole(events).json_pieces()).encode("utf-8")


def _answer_bytes(events: Sequence[Event]) -> int:
    """A rough estimate of the answer's length in bytes."""
    return sum(_BYTES_PER_EVENT + _BYTES_PER_LOGPROB * _logprobs_in(event) for event in events)


def _logprobs_in(event: Event) -> int:
    if isinstance(event, SequenceOutput | PromptScored):
        return sum(len(token.top) + 1 for token in event.logprobs if token is not None)
    return 0


async def _send_chunk(stream: EventStream, chunk: WireOutput) -> None:
    await stream.event(chunk.json_text(), chunk.event_name)


def _headers(request: GenerationRequest) -> dict[str, str]:
    adapter = adapter_of(request)
    return {} if adapter is None else {LORA_ADAPTER: adapter}
