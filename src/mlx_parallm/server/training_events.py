"""`GET /v1/training/events`: what training does, as it does it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.core import TrainingEvent
from mlx_parallm.server.disconnect import while_connected
from mlx_parallm.server.errors import DrainingError, error_body
from mlx_parallm.server.respond.training import event_object
from mlx_parallm.server.services import Services
from mlx_parallm.server.sse import EventStream

log = logging.getLogger(__name__)


class TrainingEventsResponse(Response):
    """Listens until the client leaves, the server drains, or training ends its events."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        if services.lifecycle.draining:
            raise DrainingError("draining")
        # `core` promises aclose() on this iterator.
        events = cast(AsyncGenerator[TrainingEvent, None], services.training.events())
        stream = EventStream(send, {})
        async with aclosing(events), stream.opened(services.settings.ping_interval_s):
            try:
                await while_connected(_relay(events, stream), receive, services.lifecycle.drain_begun)
            except ClientDisconnect:
                return
            except DrainingError:
                pass
            except Exception as error:  # the status line is sent: the client must hear of it some other way
                log.exception("a stream of training events failed")
                await stream.event(error_body(error).json_text(), kind="error")
            await stream.end()


async def _relay(events: AsyncGenerator[TrainingEvent, None], stream: EventStream) -> None:
    async for event in events:
        await stream.event(event_object(event).json_text(), kind=event.kind)
