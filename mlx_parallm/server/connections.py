"""One client's connection: HTTP/1.1 by uvicorn and h11, with limits so that one client cannot hold what others need.

- The number of open connections is limited. A connection beyond the limit takes the place of another one: the one that
  has been idle, or sending its headers, for longest. If no connection is idle, it is one whose body has not arrived; if
  there is none of these either, one that only waits, such as a stream of events. In both cases it is the oldest of the
  client that has the most. If all others are being answered, the new one gets no place.
- A connection without a place is answered with 503, unless it asks for the server's health.
- Few requests begin in one iteration of the event loop, so that a burst of them does not delay what others wait for.
- Headers must arrive within a time limit (so must bodies: see `body`).
- A client that stops reading its answer is disconnected, which frees its rows.
- Input that is not HTTP gets an error body like any other error, with an id and a line in the request log.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from operator import attrgetter
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_parallm.server import request_log
from mlx_parallm.server.errors import RETRY_AFTER_S, wire_error
from mlx_parallm.server.request_log import REQUEST_ID, RequestRecord, client_of, waits

LINGER_S = 2
"""Seconds in which a refused client can read the refusal. A socket that is closed with unread input would reset the
connection."""
LINGERING = 1024
"""Number of refused clients that have this time at once, where the process may open so many files."""
_FEWEST_LINGERING = 64
"""The same in any case; they are among `OTHER_FILES`."""

_PROBES = (b"GET /health", b"GET /liveness", b"GET /ready")
"""How requests begin that ask for the server's health."""
_AT_ONCE = 8
"""Requests that begin in one iteration of the event loop."""

OTHER_FILES = 128
"""Number of files that the process opens in addition to connections: model, adapters, checkpoints, pipes of child
processes, logs."""

log = logging.getLogger(__name__)


# -- open files ------------------------------------------------------------------------------------


def reserve_open_files(connections: int) -> tuple[int, int]:
    """Raises the process's soft limit of open files (256 in a macOS terminal) to make room for `connections`, and for
    refused ones.

    Returns:
        The number of connections that fit, at most `connections`, and that of refused ones which may stay open for a
        moment. If not all connections fit, a warning is logged.
    """
    if sys.platform == "win32":  # has no such limit
        return connections, LINGERING
    allowed = _raise_soft_limit(connections + LINGERING + OTHER_FILES)
    fitting = max(1, min(connections, allowed - OTHER_FILES))
    if fitting < connections:
        log.warning(
            "this process may open %d files: at most %d of %d connections are taken; raise the limit (ulimit -n %d)",
            allowed,
            fitting,
            connections,
            connections + OTHER_FILES,
        )
    return fitting, max(_FEWEST_LINGERING, min(LINGERING, allowed - OTHER_FILES - fitting))


def _raise_soft_limit(wanted: int) -> int:
    """Raises the soft limit of open files to `wanted`, as far as the system allows, and returns the limit now in force.
    macOS refuses values below the hard limit that it reports, so smaller values are tried until one is accepted."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while target > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError):
            target = (target + soft) // 2
        else:
            return target
    return soft


# -- connections -----------------------------------------------------------------------------------


class PacedStarts:
    """Starts requests in the order in which they came, a few in each iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(min(_AT_ONCE, len(self._waiting))):
            loop.call_soon(self._waiting.popleft())  # so that an error of one does not concern the others
        if self._waiting:
            loop.call_soon(self._next)


@dataclass(slots=True)
class ConnectionLimits:
    """Limits and state that all connections share.

    `access_log`: whether refusals are logged. `lingering`: number of connections without a place that are open for a
    moment, at most `max_lingering`. `idle`: those with a place that are idle, beginning with the one that is so for
    longest.
    """

    max_connections: int
    max_lingering: int
    header_timeout_s: float
    write_timeout_s: float
    access_log: bool
    lingering: int = 0
    idle: dict[LimitedProtocol, None] = field(default_factory=dict)
    starts: PacedStarts = field(default_factory=PacedStarts)


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with the limits. Used on the event loop's thread only.

    Args:
        uvicorn: the arguments that uvicorn passes to its protocol classes.
    """

    def __init__(self, limits: ConnectionLimits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.connections: set[LimitedProtocol]  # type: ignore[assignment]  # all are of this class
        self._limits = limits
        self._refused = self._lingers = False
        self._first_bytes = b""
        self._idle_since = self.loop.time()
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    # uvicorn's and asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._headers_late)
        if len(self.connections) > self._limits.max_connections and not self._take_place():
            self._linger()
        else:
            self._limits.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._limits.lingering -= self._lingers
        self._limits.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._first_bytes:
            self._first_bytes += data
        elif not self._idle or data.startswith(_PROBES):
            self._read(data)
        else:
            self._first_bytes = data
            self._limits.starts.add(self._begin)

    def _begin(self) -> None:
        """Reads what came while the request waited to start."""
        data, self._first_bytes = self._first_bytes, b""
        if self.transport.is_closing() or self._refused:
            return
        if self._lingers:
            self._refuse_for_number()
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Starts the header timer when a request begins, and stops it at the end of the headers. Between two requests
        of one connection, uvicorn's keep-alive timer runs."""
        super().data_received(data)
        if not self._idle:
            self._limits.idle.pop(self, None)
        if not self._idle and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif self._idle and self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._headers_late)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        self._watch_writing()
        super().on_response_complete()
        if self._lingers:
            self.transport.close()
        elif self._idle:
            self._limits.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", msg)

    # number of connections

    @property
    def _idle(self) -> bool:
        """Whether the connection is open and no request is being answered. Headers that still arrive do not count."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    @property
    def _receiving(self) -> bool:
        """Whether a body has not arrived as a whole."""
        return self.cycle is not None and self.cycle.more_body and not self.transport.is_closing()

    @property
    def _waits(self) -> bool:
        """Whether its request only waits for what others do."""
        return self.cycle is not None and waits(cast(Scope, self.cycle.scope)) and not self.transport.is_closing()

    def _take_place(self) -> bool:
        """Takes the place of another connection that is not being answered. Returns false if all others are."""
        taken = next((other for other in self._limits.idle if other._idle), None)
        if taken is None:
            others = [other for other in self.connections if other is not self]
            replaceable = _of_the_greediest([other for other in others if other._receiving]) or _of_the_greediest(
                [other for other in others if other._waits]
            )
            taken = min(replaceable, key=_since, default=None)
        if taken is not None:
            taken._give_place()
        return taken is not None

    def _give_place(self) -> None:
        """Loses its place. If its first request may be under way, it is answered; otherwise the connection is
        closed."""
        if self.cycle is None:
            self._linger()
        else:
            self.transport.abort()

    def _linger(self) -> None:
        """Leaves the connection open for a moment, without a place."""
        self._lingers = True
        self.connections.discard(self)
        self._limits.idle.pop(self, None)
        self._limits.lingering += 1
        if self._limits.lingering > self._limits.max_lingering:
            self.transport.abort()
        else:
            self._linger_timer = self.loop.call_later(LINGER_S, self._lingered)

    def _lingered(self) -> None:
        """Closes the connection, but not before an answer."""
        if self._refused:
            self.transport.abort()
        elif self._first_bytes or not self._idle:
            self._linger_timer = self.loop.call_later(LINGER_S, self._lingered)
        else:
            self._refuse_for_number()

    # header timeout

    def _headers_late(self) -> None:
        self._header_timer = None
        if self._first_bytes:  # the server is late, not the client
            return
        received, _ = self.conn.trailing_data
        if received and self.conn.our_state is h11.IDLE:
            self._refuse(408, "header_timeout", "The request's headers came too slowly.")
        else:
            self.transport.close()

    # write timeout

    def _watch_writing(self) -> None:
        if self._write_timer is None and (buffered := self.transport.get_write_buffer_size()):
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self._check_writing, buffered)

    def _check_writing(self, buffered_before: int) -> None:
        """Aborts the connection if the client seems to have read nothing since the last check: the buffer did not
        shrink, and nothing is being added to it, because writing is paused or the response is complete."""
        self._write_timer = None
        adding = not self.flow.write_paused and self.cycle is not None and not self.cycle.response_complete
        if adding or self.transport.get_write_buffer_size() < buffered_before:
            self._watch_writing()
        else:
            self.transport.abort()

    # refusals

    def _refuse_for_number(self) -> None:
        self._refuse(503, "too_many_connections", "Too many connections are open; try again.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Sends an error response and closes the connection `LINGER_S` later. If an answer has begun, closes it now."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._refused = True
        if self.cycle is not None:  # a route that still answers may send nothing more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        record = RequestRecord(status=status, error=code)
        if self._limits.access_log:
            request_log.write(record, None)
        body = wire_error(status, code, message).json_text().encode()
        for event in _response(status, body, record.request_id):
            self.transport.write(self.conn.send(event) or b"")
        with suppress(OSError):  # the client has gone
            self.transport.write_eof()
        if self._linger_timer is None:
            self._linger()
        else:
            self._linger_timer.cancel()
            self._linger_timer = self.loop.call_later(LINGER_S, self._lingered)


_since = attrgetter("_idle_since")


def _of_the_greediest(connections: Sequence[LimitedProtocol]) -> list[LimitedProtocol]:
    """Those of the client that has the most of them. Each has a request."""
    clients = [client_of(cast(Scope, each.cycle.scope)) for each in connections]
    greediest = {client for client, _ in Counter(clients).most_common(1)}
    return [each for each, client in zip(connections, clients, strict=True) if client in greediest]


def _response(status: int, body: bytes, request_id: str) -> tuple[h11.Event, ...]:
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    headers.append((REQUEST_ID, request_id))
    if status == 503:
        headers.append(("retry-after", str(RETRY_AFTER_S)))
    response = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
    return response, h11.Data(data=body), h11.EndOfMessage()
