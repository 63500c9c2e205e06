"""Runs the app in this process: signals drain it, a dead engine ends it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from mlx_parallm.errors import ConfigError, EngineDeadError
from mlx_parallm.server.connection import ConnectionLimits, LimitedProtocol
from mlx_parallm.server.open_files import allow_connections
from mlx_parallm.server.services import Services

MAX_HEADER_BYTES = 64 * 1024
CLOSING_S = 3
ALIVE_CHECK_TICKS = 10  # of 0.1 s each
EXIT_OK, EXIT_ENGINE_DEAD = 0, 1


async def serve(
    app: FastAPI, host: str, port: int, shutdown_timeout_s: float, on_started: Callable[[int], None]
) -> int:
    """Serves until a signal or the engine's death; returns the process's exit code. Signals are taken on the main
    thread only.

    SIGTERM or SIGINT drains: requests under way may finish within `shutdown_timeout_s`, then they are
    ended with an error. A second signal ends them at once. A pause ends with the drain. `on_started` gets the bound
    port (`port` 0 takes a free one). The exit code is 0 after a drain, 1 when the engine died.

    Raises:
        ConfigError: `host` and `port` cannot be listened on.
    """
    listening = bind(host, port)
    server = DrainingServer(app, shutdown_timeout_s, lambda: on_started(listening.getsockname()[1]))
    try:
        await server.serve(sockets=[listening])
    finally:
        services: Services = app.state.services
        await asyncio.to_thread(services.grammars.close)
    return server.exit_code


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
        # Accepted sockets inherit it. asyncio sets it only on sockets whose protocol number is named, and without
        # it Nagle and a delayed ACK hold a kept connection's body back for 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another host or port") from error


class DrainingServer(uvicorn.Server):
    """uvicorn, with the drain before its own shutdown: it would refuse connections where we owe a 503."""

    def __init__(self, app: FastAPI, shutdown_timeout_s: float, on_started: Callable[[], None]) -> None:
        super().__init__(_config(app))
        self.exit_code = EXIT_OK
        self._services: Services = app.state.services
        self._timeout_s = shutdown_timeout_s
        self._on_started = on_started
        self._drain_until: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's, which exits without a drain and raises the signal again."""
        if self._drain_until is not None:
            self._drain_until = time.monotonic()
        self.begin_drain()

    def begin_drain(self) -> None:
        self._services.lifecycle.begin_drain()
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._timeout_s

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s; true stops the server."""
        if counter % ALIVE_CHECK_TICKS == 0 and not self._services.engine.stats().alive:
            self.exit_code = EXIT_ENGINE_DEAD
            self._services.lifecycle.expire()
            return True
        if self._drain_until is not None and self._services.engine.stats().paused:
            await self._end_pause()
        return await super().on_tick(counter) or self._drained()

    async def _end_pause(self) -> None:
        """A drain lets requests finish, those too that a pause holds."""
        with suppress(EngineDeadError):  # which a tick finds out by itself
            await self._services.engine.resume()

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        if time.monotonic() >= self._drain_until:
            self._services.lifecycle.expire()
            return True
        return self._services.gate.held == 0 and not self._services.lifecycle.working


def _config(app: FastAPI) -> uvicorn.Config:
    """Logging is the caller's; `http` is pinned because the limits are h11's."""
    settings = app.state.services.settings
    limits = ConnectionLimits(
        allow_connections(settings.connections),
        settings.header_timeout_s,
        settings.write_timeout_s,
        settings.access_log,
    )
    return uvicorn.Config(
        app,
        http=partial(LimitedProtocol, limits),  # type: ignore[arg-type]  # uvicorn calls it, as it would a class
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=CLOSING_S,
    )
