"""One generation request from its place in the queue to the last byte of its answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.core import (
    AdapterRef,
    Collection,
    Event,
    GenerationRequest,
    PromptScored,
    RequestFailed,
    RequestFinished,
    SequenceOutput,
)
from mlx_parallm.errors import EngineError, ParaLLMError
from mlx_parallm.server.disconnect import while_connected
from mlx_parallm.server.errors import code_of
from mlx_parallm.server.exchange import LORA_ADAPTER, Exchange, exchange_of
from mlx_parallm.server.metrics import RequestObserver
from mlx_parallm.server.planning import collection_of
from mlx_parallm.server.respond.answer import adapter_of
from mlx_parallm.server.respond.wording import Wording
from mlx_parallm.server.selectors import Choice
from mlx_parallm.server.services import Services
from mlx_parallm.server.shares import client_of
from mlx_parallm.server.sse import EventStream
from mlx_parallm.server.wire.base import WireOutput
from mlx_parallm.server.wire.common import GenerationBody

log = logging.getLogger(__name__)

_BYTES_OF_EVENT, _BYTES_OF_LOGPROB = 32, 64


class GenerationResponse(Response):
    """Reserve, lease, check what is to be collected, prepare, generate, answer.

    All of it happens in the response's own call, so that one block bounds the request's life: its place
    in the queue, its adapter version and its rows are given back when the block is left, whichever way that happens.

    Args:
        prepare: renders and tokenises, and compiles a grammar where `body` has one; it runs in a worker thread.
    """

    def __init__(
        self,
        services: Services,
        choice: Choice,
        sequences: int,
        body: GenerationBody,
        prepare: Callable[[AdapterRef, Collection | None], Wording],
        stream: bool,
    ) -> None:
        super().__init__()
        self._services = services
        self._choice = choice
        self._sequences = sequences
        self._body = body
        self._prepare = prepare
        self._send_answer = self._send_events if stream else self._send_whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        exchange.asks(self._choice.selector or self._services.card.name)
        with self._services.admit(self._sequences), self._services.lease(self._choice) as adapter:
            answer = await self._prepared(scope, adapter)
            exchange.planned(answer.request)
            try:
                await self._send_answer(answer, scope, receive, send)
            except ClientDisconnect:
                exchange.disconnected = True
                self._services.metrics.client_disconnects.inc()

    async def _prepared(self, scope: Scope, adapter: AdapterRef) -> Wording:
        workers, client = self._services.workers, client_of(scope)
        collection = await collection_of(self._body, self._services.training, adapter, client)
        prepare = partial(self._prepare, adapter, collection)
        if self._body.compiles:
            return await workers.compile(client, prepare)
        return await workers.run(Request(scope).state.body_bytes, prepare)

    async def _send_whole(self, answer: Wording, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._collect(answer, exchange_of(scope))
        events = await while_connected(work, receive, self._services.lifecycle.expired)
        body = await self._services.workers.run(_bytes_of(events), partial(_worded, answer, events))
        await Response(body, headers=_headers(answer.request), media_type="application/json")(scope, receive, send)

    async def _collect(self, answer: Wording, exchange: Exchange) -> list[Event]:
        async with aclosing(run(self._services, answer.request, exchange)) as events:
            return [event async for event in events]

    async def _send_events(self, answer: Wording, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        stream = EventStream(send, _headers(answer.request))
        async with stream.opened(self._services.settings.ping_interval_s):
            try:
                await while_connected(self._relay(answer, stream, exchange), receive, self._services.lifecycle.expired)
            except ClientDisconnect:
                raise
            except Exception as error:  # the status line is sent: whatever went wrong, the client must hear of it
                if not isinstance(error, ParaLLMError):
                    log.exception("a stream failed")
                exchange.error = code_of(error)
                await _say(stream, answer.failed(error))
            await (stream.done() if answer.ENDS_WITH_DONE else stream.end())

    async def _relay(self, answer: Wording, stream: EventStream, exchange: Exchange) -> None:
        for chunk in answer.opening_chunks():
            await _say(stream, chunk)
        async with aclosing(run(self._services, answer.request, exchange)) as events:
            async for event in events:
                for chunk in answer.chunks(event):
                    await _say(stream, chunk)


async def run(services: Services, request: GenerationRequest, exchange: Exchange) -> AsyncGenerator[Event, None]:
    """The engine's events, observed by the metrics and `exchange`; the last one is RequestFinished. Close it to abort.

    Raises:
        the error of a RequestFailed, or EngineError when the engine ended without a terminal event.
    """
    with RequestObserver(services.metrics, request) as observer:
        # `core` promises aclose() on this iterator.
        events = cast(AsyncGenerator[Event, None], services.engine.generate(request))
        async with aclosing(events):
            async for event in events:
                if isinstance(event, RequestFailed):
                    raise event.error
                observer.see(event)
                exchange.see(event)
                yield event
                if isinstance(event, RequestFinished):
                    return
        raise EngineError("the engine ended a request without a terminal event")


def _worded(answer: Wording, events: Sequence[Event]) -> bytes:
    """The whole answer as JSON. In a worker thread: with logprobs it is long. Written piece by piece, because each
    piece is written under the interpreter lock."""
    return "".join(answer.whole(events).json_pieces()).encode("utf-8")


def _bytes_of(events: Sequence[Event]) -> int:
    """How long the answer will be, about."""
    return sum(_BYTES_OF_EVENT + _BYTES_OF_LOGPROB * _logprobs_in(event) for event in events)


def _logprobs_in(event: Event) -> int:
    if isinstance(event, SequenceOutput | PromptScored):
        return sum(len(token.top) + 1 for token in event.logprobs if token is not None)
    return 0


async def _say(stream: EventStream, chunk: WireOutput) -> None:
    await stream.event(chunk.json_text(), chunk.event_name)


def _headers(request: GenerationRequest) -> dict[str, str]:
    adapter = adapter_of(request)
    return {} if adapter is None else {LORA_ADAPTER: adapter}
