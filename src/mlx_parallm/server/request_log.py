"""One JSON line for each request, refusals included, and what every response has: an id, and its count by status.

The line never has text of a prompt or an answer. Text of a client's (names, ids, paths) is escaped and cut.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.server.errors import unexpected_response
from mlx_parallm.server.exchange import IGNORED_FIELDS, REQUEST_ID, Exchange
from mlx_parallm.server.metrics import ServerMetrics

CLIENT_LEFT = 499
"""The status in the log where a client left before it had an answer; nginx's."""
PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Routes that are asked every few seconds: an answer that is no error is logged at level debug."""
MAX_TEXT = 200

log = logging.getLogger("mlx_parallm.access")


def write_plain_lines() -> None:
    """Has the log's lines written to stderr as they are, so that each of them is JSON from its first character."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
    log.propagate = False


class ExchangeMiddleware:
    """The outermost one: whatever is answered, and by whom, passes through it."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, access_log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._logs = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.begun(scope)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._begin(exchange, message)
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:  # answered here, and raised again for the server to log
            exchange.error = "internal_error"
            if exchange.status is None:
                await unexpected_response(error)(scope, receive, send_on)
            raise
        finally:
            self._end(exchange, scope)

    def _begin(self, exchange: Exchange, message: Message) -> None:
        exchange.status = message["status"]
        self._metrics.responses.labels(str(exchange.status)).inc()
        headers = MutableHeaders(scope=message)
        headers[REQUEST_ID] = exchange.request_id
        if exchange.ignored.names:
            headers[IGNORED_FIELDS] = ", ".join(exchange.ignored.names)

    def _end(self, exchange: Exchange, scope: Scope) -> None:
        self._metrics.ignored_fields.inc(exchange.ignored.count)
        if self._logs:
            write(exchange, getattr(scope.get("route"), "path", None))


def write(exchange: Exchange, route: str | None) -> None:
    """Logs one request that has ended; `route` is the route's own path, None where there is none."""
    answered = exchange.status is not None and exchange.status < 400
    level = logging.DEBUG if route in PROBES and answered else logging.INFO
    if log.isEnabledFor(level):
        fields = _fields(exchange, route) | (_of_generation(exchange) if exchange.generates else {})
        log.log(level, "%s", json.dumps(fields | _extras(exchange), separators=(",", ":")))


def _fields(exchange: Exchange, route: str | None) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": exchange.request_id,
        "method": _cut(exchange.method),
        "route": route or _cut(exchange.path),
        "status": exchange.status or CLIENT_LEFT,
        "total_ms": _ms(monotonic() - exchange.arrived_at),
    }


def _of_generation(exchange: Exchange) -> dict[str, Any]:
    return {
        "model": _cut(exchange.model),
        "adapter": exchange.adapter,
        "prompt_tokens": exchange.prompt_tokens,
        "cached_tokens": exchange.cached_tokens,
        "completion_tokens": exchange.completion_tokens,
        "queue_ms": _ms(exchange.queue_s),
        "first_token_ms": _ms(exchange.first_token_s),
        "finish": exchange.finish_reason,
    }


def _extras(exchange: Exchange) -> dict[str, Any]:
    """What only some requests have."""
    extras = {
        "error": exchange.error,
        "engine_id": None if exchange.engine_id == exchange.request_id else exchange.engine_id,
        "ignored": exchange.ignored.names,
        "did_you_mean": exchange.ignored.meant,
    }
    return {name: value for name, value in extras.items() if value}


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:MAX_TEXT]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
