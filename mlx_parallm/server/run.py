"""Runs the app in this process with uvicorn. A signal starts a drain. The server also stops if the engine dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from mlx_parallm.errors import EngineDeadError
from mlx_parallm.server.address import BACKLOG, bind
from mlx_parallm.server.connections import ConnectionLimits, LimitedProtocol, reserve_open_files
from mlx_parallm.server.entry import MAX_HEADER_BYTES
from mlx_parallm.server.services import Services
from mlx_parallm.tasks import release

ACCEPTED_AT_ONCE = 128
"""Connections that asyncio accepts per loop iteration. If no more files can be opened, it logs a trace for each, each
second."""
ACCEPT_FAULT, ACCEPT_FAULT_EVERY_S = "socket.accept() out of system resource", 60.0
"""asyncio's message for it, and how often it is logged here."""
KEEP_ALIVE_S = 75
"""Seconds for which an idle connection stays open. Clients keep theirs for up to a minute, and a request that they send
while the server closes the connection fails."""

CLOSING_S = 3
TICKS_A_SECOND = 10  # of `DrainingServer.on_tick`
EXIT_OK, EXIT_ENGINE_DEAD = 0, 1

log = logging.getLogger(__name__)


async def serve(app: FastAPI, on_started: Callable[[int], None]) -> int:
    """Serves on the configured host and port until a signal comes or the engine dies, and returns the process's exit
    code: 0 after a drain, 1 if the engine died. Signals are handled only on the main thread.

    SIGTERM or SIGINT begins a drain: requests under way may finish within the configured `shutdown_timeout`, then they
    are ended with an error. A second signal ends them at once. A drain also resumes a paused engine.

    Args:
        on_started: called with the bound port, which the system chooses if port 0 is configured.

    Raises:
        ConfigError: the host and port cannot be bound.
    """
    services: Services = app.state.services
    listening = bind(services.config.host, services.config.port)
    server = DrainingServer(app, lambda: on_started(listening.getsockname()[1]))
    try:
        await server.serve(sockets=[listening])
    finally:
        await release(services.models.close)
    return server.exit_code


class DrainingServer(uvicorn.Server):
    """uvicorn's server, with a drain before uvicorn's own shutdown. That shutdown closes the listening socket at once,
    but clients should get a 503 while requests under way finish."""

    def __init__(self, app: FastAPI, on_started: Callable[[], None]) -> None:
        super().__init__(_uvicorn_config(app))
        self.exit_code = EXIT_OK
        self._services: Services = app.state.services
        self._on_started = on_started
        self._drain_until: float | None = None
        self._accept_fault_until = 0.0
        self._resuming: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio has set it to `ACCEPTED_AT_ONCE`
        asyncio.get_running_loop().set_exception_handler(self._on_loop_fault)
        self._on_started()

    def _on_loop_fault(self, loop: asyncio.AbstractEventLoop, fault: dict[str, Any]) -> None:
        """Logs what no task or callback has handled; but one line in a while if no connection can be accepted."""
        if fault.get("message") != ACCEPT_FAULT:
            loop.default_exception_handler(fault)
        elif loop.time() >= self._accept_fault_until:
            self._accept_fault_until = loop.time() + ACCEPT_FAULT_EVERY_S
            log.error(
                "no connection can be accepted (%s): this process has too many open files; raise its limit "
                "(ulimit -n), or lower server.max_connections",
                fault.get("exception"),
            )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's handler, which exits without a drain and raises the signal again."""
        if self._drain_until is not None:
            self._drain_until = time.monotonic()
        self.begin_drain()

    def begin_drain(self) -> None:
        self._services.lifecycle.begin_drain()
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._services.config.shutdown_timeout

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn every 0.1 s; true stops the server."""
        if counter % TICKS_A_SECOND == 0:
            stats = self._services.engine.stats()
            self._services.metrics.note_second(stats)
            if not stats.alive:
                self.exit_code = EXIT_ENGINE_DEAD
                self._services.lifecycle.expire()
                return True
        waits = self._resuming is not None and not self._resuming.done()
        if self._drain_until is not None and self._services.engine.stats().paused and not waits:
            self._resuming = asyncio.create_task(self._resume())  # not awaited: the device may hang
        return await super().on_tick(counter) or self._drained()

    async def _resume(self) -> None:
        """Resumes the engine, so that paused requests can finish."""
        with suppress(EngineDeadError):  # the next tick sees it
            await self._services.engine.resume()

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        if time.monotonic() >= self._drain_until:
            self._services.lifecycle.expire()
            return True
        return self._services.gate.held == 0 and not self._services.lifecycle.working


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    """uvicorn's settings. `LimitedProtocol` needs h11, so uvicorn may not choose another parser. The caller of `serve`
    configures logging."""
    services: Services = app.state.services
    config = services.config
    password = config.ssl_keyfile_password
    limits = ConnectionLimits(
        *reserve_open_files(config.connection_limit), config.header_timeout, config.write_timeout, config.access_log
    )
    return uvicorn.Config(
        app,
        http=partial(LimitedProtocol, limits),  # type: ignore[arg-type]  # uvicorn only calls it, as it calls a class
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=list(config.trusted_proxies),
        backlog=ACCEPTED_AT_ONCE,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=None if password is None else password.get_secret_value(),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
