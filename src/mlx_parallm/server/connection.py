"""One client's connection: HTTP/1.1 by uvicorn and h11, with limits that keep one client from holding what others need.

- At most so many connections are open. A new one takes the place of the one that has been idle, or sending its
  headers, for longest; where every connection is being answered, it gets a 503.
- A request's headers must come in time (its body too: see `body.py`).
- A client that reads nothing of what it is sent is disconnected; its rows are free then.
- What is not HTTP gets an error body like any other, with an id and a line in the request log.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_parallm.server import request_log
from mlx_parallm.server.errors import RETRY_AFTER_S
from mlx_parallm.server.exchange import REQUEST_ID, Exchange, new_request_id

LINGER_S = 2
_MOST_LINGERING = 64


@dataclass(slots=True)
class ConnectionLimits:
    """What all connections share. `access_log`: refusals are logged. `lingering`: refused ones that are kept until
    their clients have read why."""

    most: int
    header_timeout_s: float
    write_timeout_s: float
    access_log: bool
    lingering: int = 0


class LimitedProtocol(H11Protocol):
    """Event loop only. `uvicorn`: what uvicorn gives its protocols."""

    def __init__(self, limits: ConnectionLimits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._refused = False
        self._idle_since = self.loop.time()
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # -- uvicorn's interface ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._watch_headers()
        if len(self.connections) > self._limits.most and not self._make_room():
            self._refuse(503, "server_error", "too_many_connections", "Too many connections are open; try again.")

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._limits.lingering -= self._refused
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch_headers()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        self._watch_writing()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_request_error", "invalid_http", msg)

    # -- how many --------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        """Whether no request is being read or answered."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def _make_room(self) -> bool:
        others = [other for other in self.connections if isinstance(other, LimitedProtocol) and other is not self]
        idle = [other for other in others if other._idle]
        if idle:
            min(idle, key=lambda other: other._idle_since).transport.abort()
        return bool(idle)

    # -- headers ---------------------------------------------------------------------------------

    def _watch_headers(self) -> None:
        """Starts the clock when a request begins, and stops it when its headers are there. Between two requests of a
        connection uvicorn's own clock runs."""
        if not self._idle and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif self._idle and self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._headers_late)

    def _headers_late(self) -> None:
        begun, _ = self.conn.trailing_data
        if begun and self.conn.our_state is h11.IDLE:
            self._refuse(408, "invalid_request_error", "header_timeout", "The request's headers came too slowly.")
        else:
            self.transport.close()

    # -- writing ---------------------------------------------------------------------------------

    def _watch_writing(self) -> None:
        if self._write_timer is None and (held := self.transport.get_write_buffer_size()):
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self._check_writing, held)

    def _check_writing(self, held_before: int) -> None:
        """Aborts where the client took nothing of what is held for it, although nothing was added: the application may
        add nothing while writing is paused, nor after the answer's end."""
        self._write_timer = None
        adding = not self.flow.write_paused and self.cycle is not None and not self.cycle.response_complete
        if adding or self.transport.get_write_buffer_size() < held_before:
            self._watch_writing()
        else:
            self.transport.abort()

    # -- refusing --------------------------------------------------------------------------------

    def _refuse(self, status: int, kind: str, code: str, message: str) -> None:
        """Answers, and closes after the client had time to read: closing on unread input resets the connection."""
        self._refused = True
        self.connections.discard(self)
        self._limits.lingering += 1
        exchange = Exchange(new_request_id("req"), status=status, error=code)
        if self._limits.access_log:
            request_log.write(exchange, None)
        for event in _error(status, kind, code, message, exchange.request_id):
            self.transport.write(self.conn.send(event) or b"")
        if self._limits.lingering > _MOST_LINGERING:
            self.transport.abort()
            return
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


def _error(status: int, kind: str, code: str, message: str, request_id: str) -> tuple[h11.Event, ...]:
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}, separators=(",", ":")).encode()
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    headers.append((REQUEST_ID, request_id))
    if status == 503:
        headers.append(("retry-after", str(RETRY_AFTER_S)))
    response = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
    return response, h11.Data(data=body), h11.EndOfMessage()
