"""EngineResponse: a node's answer to a request that the head has sent it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import cast

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.core import BASE_ADAPTER, EngineClient, Event, Grammar, RequestFailed, RequestFinished, ServedModel
from mlx_parallm.errors import ContextLengthError, ParaLLMError
from mlx_parallm.server.cluster.wire import WireClock, WireEvent, WireRequest
from mlx_parallm.server.http.request_log import client_of
from mlx_parallm.server.lifecycle import while_connected
from mlx_parallm.server.services import Services

_HEADERS = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class EngineResponse(Response):
    """Holds places in the queue and the adapter version while the engine answers. Ends the request if the head closes
    the connection.

    Args:
        engine: this node's own.
    """

    def __init__(self, services: Services, engine: EngineClient, asked: WireRequest) -> None:
        super().__init__()
        self._services = services
        self._engine = engine
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request.

        Raises:
            DrainingError, InferenceDisabledError, AsleepError, OverloadedError: the request is not accepted now.
            UnknownModelError: this node does not hold the version.
            ContextLengthError: this node has less memory for contexts than the head.
        """
        services, asked = self._services, self._asked
        services.check_open()
        async with AsyncExitStack() as held:
            held.enter_context(services.gate.reserve(len(asked.prompts) * asked.n))
            model = await held.enter_async_context(services.models.use(services.first.card.name))
            selector = BASE_ADAPTER.name if asked.adapter == BASE_ADAPTER else str(asked.adapter)
            held.enter_context(services.adapters.lease(selector))
            _check_fits(asked, model.card.context_length)
            grammar = await self._grammar(model, scope)
            await self._send(asked, grammar, receive, send)

    async def _grammar(self, model: ServedModel, scope: Scope) -> Grammar | None:
        spec = self._asked.grammar
        if spec is None:
            return None
        return await self._services.workers.compile(client_of(scope), lambda: model.grammars.compile(spec))

    async def _send(self, asked: WireRequest, grammar: Grammar | None, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        clock = WireClock(clock=time.monotonic()).model_dump_json().encode() + b"\n"
        await send({"type": "http.response.body", "body": clock, "more_body": True})
        try:
            async with while_connected(receive, self._services.lifecycle.expired):
                generated = self._engine.generate(asked.request(grammar))
                async with aclosing(cast(AsyncGenerator[Event, None], generated)) as events:
                    async for event in events:
                        await send({"type": "http.response.body", "body": WireEvent.line(event), "more_body": True})
                        if isinstance(event, RequestFinished | RequestFailed):
                            break
        except ClientDisconnect:
            return
        except ParaLLMError as error:  # the status line has been sent
            line = WireEvent.line(RequestFailed(error))
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_fits(asked: WireRequest, context_length: int) -> None:
    needed = max(map(len, asked.prompts)) + asked.stopping.max_tokens
    if needed > context_length:
        raise ContextLengthError(f"the request needs {needed} tokens, and this node has room for {context_length}")
