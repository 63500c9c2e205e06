"""The server's side: it restores what clients had changed, shows that it lives, and reports what they change."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client.core import Metric
from pydantic import TypeAdapter
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.core.adapters import name_and_step
from mlx_parallm.errors import ConflictError, ParaLLMError
from mlx_parallm.extras.supervise import VARIABLE, Beginning, Changes, LoadedAdapter, Report
from mlx_parallm.server.metrics_table import Gauge, Table
from mlx_parallm.server.request_log import record_of
from mlx_parallm.server.routing import Endpoint

if TYPE_CHECKING:
    from mlx_parallm.server.backend import Backend
    from mlx_parallm.server.services import Services

_BEAT_S = 1.0
_BEGINNING, _REPORT = TypeAdapter(Beginning), TypeAdapter(Report)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Supervised:
    """This process, as its supervisor has started it.

    Attributes:
        connection: to the supervisor.
        beginning: what it has said.
    """

    connection: socket.socket
    beginning: Beginning


@cache
def supervision() -> Supervised | None:
    """None: no supervisor has started this process."""
    number = os.environ.pop(VARIABLE, None)
    if number is None:
        return None
    connection = socket.socket(fileno=int(number))
    with connection.makefile("rb") as lines:  # the supervisor has written at once, or is gone
        return Supervised(connection, _BEGINNING.validate_json(lines.readline() or b"{}"))


@asynccontextmanager
async def supervised(app: FastAPI) -> AsyncIterator[None]:
    """Restores what clients had changed, and reports to the supervisor until the block ends."""
    process = supervision()
    if process is None:
        yield
        return
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    services: Services = app.state.services
    at_start = state_of(services)
    await restore(process.beginning.changes, services)
    reader, writer = await asyncio.open_connection(sock=process.connection)
    reporter = Reporter(services, at_start, writer)
    app.user_middleware.append(Middleware(ReportingMiddleware, reporter=reporter))  # the last one before the router
    tasks = [asyncio.create_task(work) for work in (reporter.beat(), _end_with_supervisor(reader))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        reporter.report(ends=services.engine.stats().stuck)


async def _end_with_supervisor(reader: asyncio.StreamReader) -> None:
    """Begins the end of this process, as SIGTERM does, when the supervisor is gone."""
    with suppress(ConnectionError):
        await reader.read()
    _log.error("the supervisor of this server is gone: it ends, too")
    os.kill(os.getpid(), signal.SIGTERM)


# -- what clients change ---------------------------------------------------------------------------


def state_of(services: Services) -> Changes:
    """All that clients may change and that is restored. Nodes of a cluster get their adapters from the others."""
    schedule = services.engine.stats().schedule
    if services.cluster is not None:
        return Changes(schedule=schedule)
    loaded = (card for card in services.adapters.cards() if card.live and card.root and card.checkpoint is None)
    adapters = tuple(LoadedAdapter(str(card.ref), card.root, card.digest, card.base) for card in loaded)
    return Changes(adapters, (), dict(services.adapters.route()), schedule)


def _difference(now: Changes, at_start: Changes) -> Changes:
    names = {_name(each) for each in now.adapters}
    return Changes(
        tuple(each for each in now.adapters if each not in at_start.adapters),
        tuple(name for name in map(_name, at_start.adapters) if name not in names),
        None if now.route == at_start.route else now.route,
        None if now.schedule == at_start.schedule else now.schedule,
    )


def _name(loaded: LoadedAdapter) -> str:
    return loaded.adapter.partition("@")[0]


async def restore(changes: Changes, services: Services) -> None:
    """Makes these changes again. What cannot be made again is logged."""
    adapters = services.adapters
    live = {card.ref.name: card.ref.version for card in adapters.cards() if card.live}
    steps: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        (f"{name} unloaded", partial(adapters.unload, name)) for name in changes.unloaded if name in live
    ]
    for each in changes.adapters:
        name, number = name_and_step(each.adapter)
        if number is not None and live.get(name, -1) < number:  # else the start has found it, or a later one
            steps.append((each.adapter, partial(_load, each, number, services)))
    if changes.route is not None:
        steps.append(("the route", partial(adapters.set_route, changes.route)))
    if changes.schedule is not None:
        steps.append(("the schedule", partial(services.engine.reschedule, changes.schedule)))
    for what, step in steps:
        try:
            await step()
            _log.info("%s: as before the restart", what)
        except ParaLLMError as error:
            _log.warning("%s is not as before the restart: %s", what, error)


async def _load(loaded: LoadedAdapter, number: int, services: Services) -> None:
    """Loads an adapter under the number that it had. If its folder has other files now, they get the next number."""
    adapters, base = services.adapters, loaded.base or None
    with suppress(ConflictError):  # a run's folder knows that the number is that of other files
        card = await adapters.load(loaded.adapter, loaded.folder, True, base)
        if card.digest == loaded.digest:
            return
        await adapters.unload(card.ref.name)
    again = await adapters.load(f"{_name(loaded)}@{number + 1}", loaded.folder, True, base)
    _log.warning("%s: its folder has new files, which are %s", loaded.adapter, again.ref)


class Reporter:
    """Tells the supervisor that this server lives, and what clients have changed. `at_start`: before that."""

    def __init__(self, services: Services, at_start: Changes, writer: asyncio.StreamWriter) -> None:
        self._services = services
        self._at_start = at_start
        self._writer = writer
        self._reported: Report | None = None

    def report(self, ends: str | None = None) -> None:
        """Sends what has changed, if that is news. `ends`: see `Report`."""
        report = Report(_difference(state_of(self._services), self._at_start), ends)
        if report != self._reported:
            self._reported = report
            self._writer.write(_REPORT.dump_json(report) + b"\n")

    async def beat(self) -> None:
        """Shows each second that the event loop runs. A supervisor that was stopped hears it later, once."""
        await asyncio.sleep(_BEAT_S)  # by then it listens, or has failed
        self.report()
        while True:
            await asyncio.sleep(_BEAT_S)
            if not self._writer.transport.get_write_buffer_size():
                self._writer.write(b"\n")


class ReportingMiddleware:
    """Reports what a control action has changed before its client hears that it is done."""

    def __init__(self, app: ASGIApp, reporter: Reporter) -> None:
        self._app = app
        self._reporter = reporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def report_and_send(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_control(scope):
                self._reporter.report()
            await send(message)

        await self._app(scope, receive, report_and_send)


def _is_control(scope: Scope) -> bool:
    route = scope.get("route")
    return (isinstance(route, Endpoint) and route.access.audited) or record_of(scope).controls


# -- metrics ---------------------------------------------------------------------------------------

_RESTARTS: Table[Beginning] = Table(
    (),
    Gauge("restarts", "Times that the supervisor has started the server again.", lambda begun: begun.restarts),
    Gauge(
        "last_restart",
        "1, with the reason why the supervisor has last started the server again.",
        lambda begun: {begun.reason: 1} if begun.reason else {},
        by=("reason",),
    ),
)


def metrics(backend: Backend) -> Iterator[Metric]:
    """Those of a server with a supervisor. Without one, they have no samples."""
    process = supervision() if backend.config.supervise else None
    return _RESTARTS.read({} if process is None else {(): process.beginning})
