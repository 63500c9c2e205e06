"""The life of one generation request, from its place in the queue to the last byte of its answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.grammar import KnownGrammars
from mlx_parallm.core.requests import (
    Event,
    GenerationRequest,
    PromptScored,
    RequestFailed,
    RequestFinished,
    SequenceOutput,
    SequencePooled,
)
from mlx_parallm.errors import EngineError, ParaLLMError
from mlx_parallm.server.api.answer import AnswerWriter, Watch
from mlx_parallm.server.api.bodies import MAX_SEQUENCES, GenerationBody, PoolingBody
from mlx_parallm.server.errors import code_of
from mlx_parallm.server.limits import SMALL_BYTES, Account
from mlx_parallm.server.metrics import RequestObserver
from mlx_parallm.server.request import (
    RequestContext,
    adapter_named_by,
    assignment_key,
    check_permitted,
    collection_of,
    places_of,
    select_adapter,
)
from mlx_parallm.server.request_log import address_of, client_of, record_of
from mlx_parallm.server.services import Services
from mlx_parallm.server.streams import EventStream, while_connected

log = logging.getLogger(__name__)

Events = AsyncGenerator[Event, None]
"""The events of one request."""
SESSION_HEADER = "x-session-id"
_BYTES_PER_EVENT, _BYTES_PER_LOGPROB, _BYTES_PER_BYTE = 32, 64, 5


class GenerationResponse(Response):
    """Reserves places in the queue, leases the adapter, prepares the request, generates, and sends the answer.

    All of this happens in `__call__`, so one block bounds the request's life: its places in the queue, its adapter
    version and its rows are released when the block ends, for whatever reason.

    Args:
        prompts: the number of prompts, each of which is answered `body.n` times.
        prepare: renders and tokenises the prompts for a base model, and compiles the grammar. It runs in a worker
            thread.
    """

    def __init__(
        self,
        services: Services,
        body: GenerationBody | PoolingBody,
        prompts: int,
        prepare: Callable[[RequestContext], AnswerWriter],
    ) -> None:
        super().__init__()
        self._services = services
        self._body = body
        self._prepare = prepare
        self._prompts = prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request from its place in the queue to the last byte of its answer.

        Raises:
            RoleError: see `check_permitted`.
            DrainingError, InferenceDisabledError, AsleepError, EngineDeadError, ShortMemoryError: see
                `Services.check_open`.
            OverloadedError: the queue is full, or a limit of the key does not allow the request now.
            ModelUnavailableError: the base model cannot be loaded.
            UnknownModelError: the adapter's name is unknown; there is no fallback to the base model.
            the errors of `prepare` and `generate`, but none after the status line of a stream was sent.
        """
        try:
            await self._run(scope, receive, send)
        except ClientDisconnect:
            record_of(scope).disconnected = True
            self._services.metrics.client_disconnects.inc()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The whole way of the request. Its places, its base model and its version are released at the end."""
        services, body, record = self._services, self._body, record_of(scope)
        check_permitted(services.key, body)
        selector = select_adapter(body, services.model_names)
        base = services.models.find(body.model, selector.name)
        places = places_of(body, self._prompts)
        record.set_model(selector.name or base)
        services.check_open()
        account = record.account = services.accounts.of(services.key)
        async with AsyncExitStack() as held:
            held.enter_context(account.request())
            held.enter_context(services.gate.reserve(places, account.queue_name))
            waiting = while_connected(receive, services.lifecycle.expired)  # the client may leave meanwhile
            async with nullcontext() if services.models.is_ready(base) else waiting:
                model = await held.enter_async_context(services.models.use(base))
            name = await services.adapter_name(selector, base, record)
            with adapter_named_by(selector.param, name):
                key = assignment_key(body, Headers(scope=scope).get(SESSION_HEADER))
                adapter = held.enter_context(services.adapters.lease(name, key))
            if (collection := collection_of(body, address_of(scope))) is not None:
                collecting = services.require_collection("collect_trajectory")
                collection = await collecting.check(collection, adapter, services.key.reader, body.task_prompt)
            context = RequestContext(services.key, services.config, model, adapter, collection)
            size = scope["state"]["body_bytes"]
            if body.compiles:
                prepare = partial(self._prepare_with_grammar, context)
                writer = await services.workers.compile(client_of(scope), size, prepare)
            else:
                writer = await services.workers.run(size, partial(self._prepare, context))
            record.set_request(writer.request, body.request_id)
            if record.id_from_client:
                writer.chosen_id = record.request_id
            events = generate(services, writer.request, account, writer.watch)
            await (self._send_events if body.stream else self._send_whole)(writer, events, scope, receive, send)

    def _prepare_with_grammar(self, context: RequestContext, new: bool) -> AnswerWriter:
        """`new`: whether a grammar may be compiled that is not known."""
        model = context.model if new else replace(context.model, grammars=KnownGrammars(context.model.grammars))
        return self._prepare(replace(context, model=model))

    async def _send_whole(
        self, writer: AnswerWriter, events: Events, scope: Scope, receive: Receive, send: Send
    ) -> None:
        services, record, every = self._services, record_of(scope), list[Event]()
        async with while_connected(receive, services.lifecycle.expired):
            async for event in events:
                record.observe(event)
                every.append(event)
        body = await services.workers.run(_answer_bytes(every), partial(_json, writer, every))
        await Response(body, headers=record.adapter_header, media_type="application/json")(scope, receive, send)

    async def _send_events(
        self, writer: AnswerWriter, events: Events, scope: Scope, receive: Receive, send: Send
    ) -> None:
        services, record = self._services, record_of(scope)
        stream = EventStream(send, record.adapter_header, writer.FRAMING, writer.keep_alive)
        async with stream.opened():
            try:
                async with while_connected(receive, services.lifecycle.expired):
                    for chunk in writer.opening_chunks():
                        await stream.event(chunk)
                    async with aclosing(events):
                        async for event in events:
                            record.observe(event)
                            await self._send_event(stream, writer, event)
            except ClientDisconnect:
                raise
            except Exception as error:  # the status line has been sent, so the stream has to carry the error
                if not isinstance(error, ParaLLMError):
                    log.exception("a stream failed")
                record.error = code_of(error)
                await stream.event(writer.failed(error))
            await stream.end()

    async def _send_event(self, stream: EventStream, writer: AnswerWriter, event: Event) -> None:
        """Sends what an event adds to a stream. If that is long, a worker thread makes its text."""
        size = _answer_bytes([event])
        if size <= SMALL_BYTES:
            for chunk in writer.chunks(event):
                await stream.event(chunk)
        else:
            for text in await self._services.workers.run(size, partial(_texts, writer, event)):
                await stream.write(text)


async def generate(
    services: Services, request: GenerationRequest, account: Account, watch: Watch | None = None
) -> Events:
    """Runs a request on the engine and yields its events, which are also counted in the metrics and in the `account` of
    its key. The last one is RequestFinished. Closing the generator aborts the request. `watch`: see `AnswerWriter`.

    Raises:
        EngineError: the events ended without RequestFinished or RequestFailed.
        the error of a RequestFailed.
    """
    with RequestObserver(services.metrics, request, account) as observer:
        many = len(request.prompts) > MAX_SEQUENCES
        events = _in_parts(services.engine, request) if many else services.engine.generate(request)
        if request.collection is not None:
            events = services.require_collection().collect(request, events)
        if watch is not None:
            events = watch(events)
        # `EngineClient` and `CollectingClient` promise that these iterators have `aclose`.
        async with aclosing(cast(AsyncGenerator[Event, None], events)):
            async for event in events:
                if isinstance(event, RequestFailed):
                    raise event.error
                observer.observe(event)
                yield event
                if isinstance(event, RequestFinished):
                    return
        raise EngineError("the engine ended a request without a terminal event")


async def _in_parts(engine: EngineClient, request: GenerationRequest) -> AsyncIterator[Event]:
    """The events of a request for embeddings or scores, of whose prompts at most `MAX_SEQUENCES` are in the engine at a
    time: those of others come in between."""
    ended: list[RequestFinished] = []
    for start in range(0, len(request.prompts), MAX_SEQUENCES):
        part = replace(request, prompts=request.prompts[start : start + MAX_SEQUENCES])
        # `EngineClient` promises that this iterator has `aclose`.
        async with aclosing(cast(AsyncGenerator[Event, None], engine.generate(part))) as events:
            async for event in events:
                if isinstance(event, RequestFinished):
                    ended.append(event)
                elif isinstance(event, SequencePooled):
                    yield replace(event, index=start + event.index)
                elif isinstance(event, PromptScored):
                    yield replace(event, prompt_index=start + event.prompt_index)
                else:
                    yield event
        if start >= MAX_SEQUENCES * len(ended):
            return  # `generate` tells what is missing
    yield replace(
        ended[-1],
        prompt_tokens=sum(part.prompt_tokens for part in ended),
        cached_tokens=sum(part.cached_tokens for part in ended),
        arrived_at=ended[0].arrived_at,
        started_at=ended[0].started_at,
    )


def _texts(writer: AnswerWriter, event: Event) -> list[str]:
    """What an event adds to a stream, as its framing writes it. Call it in a worker thread."""
    return [writer.FRAMING.write(chunk) for chunk in writer.chunks(event)]


def _json(writer: AnswerWriter, events: Sequence[Event]) -> bytes:
    """The whole answer as JSON. Call it in a worker thread, because logprobs can make it long. It is written in short
    pieces, because writing a piece holds the interpreter lock."""
    return b"".join(piece.encode("utf-8") for piece in writer.whole(events).json_pieces())


def _answer_bytes(events: Sequence[Event]) -> int:
    """A rough estimate of the answer's length in bytes."""
    scored = (event for event in events if isinstance(event, SequenceOutput | PromptScored))
    logprobs = sum(len(token.top) + 1 for event in scored for token in event.logprobs if token is not None)
    vectors = sum(len(event.vector) for event in events if isinstance(event, SequencePooled))
    return _BYTES_PER_EVENT * len(events) + _BYTES_PER_LOGPROB * logprobs + _BYTES_PER_BYTE * vectors
