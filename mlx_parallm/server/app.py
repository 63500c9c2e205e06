"""Builds the FastAPI app, and runs it in this process with uvicorn. This is the only module that knows all routes.

request → middlewares (`http.middleware`) → body → schema → place in the queue → adapter version
        → prompt ids → engine.generate → answer → server-sent events or one JSON body

A signal starts a drain. The server also stops if the engine dies.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from starlette.routing import Route

from mlx_parallm import __version__
from mlx_parallm.config import ServerConfig, TinkerConfig
from mlx_parallm.core import (
    AdapterClient,
    AveragingClient,
    BaseModels,
    ClusterClient,
    CollectionClient,
    EngineClient,
    LessonClient,
    PolicyClient,
    RewardModelClient,
    TrainingClient,
)
from mlx_parallm.errors import ConfigError, EngineDeadError
from mlx_parallm.rl.atropos.trajectory_api import Registration
from mlx_parallm.server.access.accounts import Accounts
from mlx_parallm.server.access.keys import KeyRing
from mlx_parallm.server.access.sessions import Sessions
from mlx_parallm.server.api import completions, control, login, models, ops, root, stats, usage
from mlx_parallm.server.api.adapters import route as adapter_routes
from mlx_parallm.server.api.chat import route as chat
from mlx_parallm.server.api.chat.history import EpisodeHistories
from mlx_parallm.server.api.messages import route as messages
from mlx_parallm.server.api.pooling import embeddings, scores
from mlx_parallm.server.api.responses import route as responses
from mlx_parallm.server.api.responses.conversation import ResponseStore
from mlx_parallm.server.api.training import average, compare, people, reward_model, schedule
from mlx_parallm.server.api.training import history as training_history
from mlx_parallm.server.api.training import lessons as lesson_routes
from mlx_parallm.server.api.training import route as training_routes
from mlx_parallm.server.api.training.collected import route as collected_routes
from mlx_parallm.server.cluster import route as cluster_routes
from mlx_parallm.server.cluster.parts import ClusterParts
from mlx_parallm.server.dashboard import route as dashboard
from mlx_parallm.server.errors import install_handlers
from mlx_parallm.server.http.connection import ConnectionLimits, LimitedProtocol, reserve_open_files
from mlx_parallm.server.http.middleware import add_middlewares
from mlx_parallm.server.http.workers import Workers
from mlx_parallm.server.lifecycle import Lifecycle, SequenceGate, SleepSwitch, release
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.openapi.document import describe
from mlx_parallm.server.protocols import trainers
from mlx_parallm.server.protocols.atropos import route as atropos_routes
from mlx_parallm.server.protocols.atropos.route import AtroposParts
from mlx_parallm.server.protocols.generate import route as generate
from mlx_parallm.server.protocols.ollama import embed as ollama_embed
from mlx_parallm.server.protocols.ollama import models as ollama_models
from mlx_parallm.server.protocols.ollama import route as ollama_routes
from mlx_parallm.server.protocols.tinker import route as tinker_routes
from mlx_parallm.server.protocols.tinker import sampling as tinker_sampling
from mlx_parallm.server.protocols.tinker import weights as tinker_weights
from mlx_parallm.server.protocols.tinker.server import TinkerServer
from mlx_parallm.server.protocols.tokens import route as tokens
from mlx_parallm.server.services import Services

if TYPE_CHECKING:
    from mlx_parallm.server.traces.export import Traces

ROUTES = (
    completions,
    chat,
    responses,
    messages,
    embeddings,
    scores,
    models,
    adapter_routes,
    training_routes,
    training_history,
    collected_routes,
    people,
    compare,
    average,
    reward_model,
    lesson_routes,
    schedule,
    control,
    cluster_routes,
    usage,
    stats,
    login,
    ops,
    tokens,
    generate,
    trainers,
    tinker_routes,
    tinker_sampling,
    tinker_weights,
)
OLLAMA_ROUTES = (ollama_routes, ollama_embed, ollama_models)

MAX_HEADER_BYTES = 64 * 1024
BACKLOG, ACCEPTED_AT_ONCE = 2048, 128
"""Connections that the system keeps for the server, and those that asyncio accepts in one turn of its loop. If no file
can be opened any more, it logs a trace for each of the latter, each second."""
ACCEPT_FAULT, ACCEPT_FAULT_EVERY_S = "socket.accept() out of system resource", 60.0
"""How asyncio calls it, and how often it is logged here."""
CLOSING_S = 3
log = logging.getLogger(__name__)
TICKS_A_SECOND = 10  # of `DrainingServer.on_tick`
EXIT_OK, EXIT_ENGINE_DEAD = 0, 1


def create_app(
    engine: EngineClient,
    adapters: AdapterClient,
    training: TrainingClient | None,
    models: BaseModels,
    config: ServerConfig,
    atropos: Registration | None = None,
    policies: PolicyClient | None = None,
    tinker: TinkerConfig | None = None,
    averages: AveragingClient | None = None,
    reward_models: RewardModelClient | None = None,
    lessons: LessonClient | None = None,
    traces: Traces | None = None,
    cluster: ClusterClient | None = None,
    collection: CollectionClient | None = None,
) -> FastAPI:
    """The HTTP server of these parts, which routes find on `app.state.services` (a `Services`). `training`, `policies`,
    `averages`, `reward_models` and `lessons` are None if the server does not train.

    Args:
        atropos: how this trainer describes itself to environments of Atropos; None: its API is not served.
        tinker: limits of the Tinker API.
        traces: makes the spans of requests; None: they are not traced.
        cluster: the cluster that this server is a node of.
        collection: takes requests to be collected; None: `training` does.
    """
    parts = None if cluster is None else ClusterParts.of(cluster, engine, models.first.card.name)
    engine = engine if parts is None else parts.engine
    gate = SequenceGate(config.max_batch_size + config.max_queued)
    key = config.api_key
    token = None if cluster is None else cluster.token
    ring = KeyRing(None if key is None else key.get_secret_value(), config.keys_file, token)
    accounts, sessions = Accounts(ring), Sessions(ring)
    model_names = [status.name for status in models.statuses()]
    metrics = ServerMetrics(engine, adapters, training, gate, accounts, model_names, parts)
    app = _empty_app()
    app.state.services = Services(
        engine,
        adapters,
        training,
        models,
        config,
        Lifecycle(),
        gate,
        SleepSwitch(engine, gate),
        metrics,
        ResponseStore(),
        EpisodeHistories(),
        Workers(config.body_timeout, config.max_body_bytes),
        accounts,
        sessions,
        started_at=int(time.time()),
        tinker=None if policies is None else TinkerServer(policies, models.first.card, tinker or TinkerConfig()),
        averages=averages,
        reward_models=reward_models,
        lessons=lessons,
        collection=collection or training,
        cluster=parts,
    )
    modules: tuple[ModuleType, ...] = (*ROUTES, *(OLLAMA_ROUTES if config.ollama_api else ()))
    modules += (dashboard,) if config.dashboard else ()
    if atropos is not None and training is not None:
        app.state.atropos = AtroposParts.of(atropos, training, models.first.card)
        modules += (atropos_routes,)
    else:
        modules += (root,)
    routes = _add_routes(app, modules)
    install_handlers(app)
    add_middlewares(app, config, metrics, ring, sessions, traces)
    app.openapi = partial(describe, app, routes, config.strict_fields)  # type: ignore[method-assign]
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of a server that serves every API. No model is loaded."""
    app = _empty_app()
    return describe(app, _add_routes(app, (*ROUTES, *OLLAMA_ROUTES, atropos_routes)), strict_fields=False)


def _empty_app() -> FastAPI:
    # FastAPI's own documentation pages load scripts from a CDN; `api.ops` has one that does not.
    return FastAPI(title="MLX ParaLLM", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)


def _add_routes(app: FastAPI, modules: Iterable[ModuleType]) -> list[Route]:
    """Adds all routes of the modules to the app, and returns them."""
    routes = [route for module in modules for route in module.router.routes if isinstance(route, Route)]
    app.router.routes.extend(routes)  # `include_router` would build each route once more, for every app
    return routes


async def serve(app: FastAPI, on_started: Callable[[int], None]) -> int:
    """Serves on the configured host and port until a signal comes or the engine dies, and returns the process's exit
    code: 0 after a drain, 1 if the engine died. Signals are handled only on the main thread.

    SIGTERM or SIGINT begins a drain: requests under way may finish within the configured `shutdown_timeout`, then they
    are ended with an error. A second signal ends them at once. A drain also resumes a paused engine.

    Args:
        on_started: called with the bound port, which the system chooses if port 0 is configured.

    Raises:
        ConfigError: the host and port cannot be bound, or the certificate cannot be used.
    """
    services: Services = app.state.services
    check_certificate(services.config)
    listening = bind(services.config.host, services.config.port)
    server = DrainingServer(app, lambda: on_started(listening.getsockname()[1]))
    try:
        await server.serve(sockets=[listening])
    finally:
        await release(services.models.close)
    return server.exit_code


def bind(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Raises ConfigError if the address is in use or does not belong to this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Accepted sockets inherit this option. asyncio sets it only on sockets whose protocol number is given. Without
        # it, Nagle's algorithm and delayed ACKs delay the body on a reused connection by 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another host or port") from error


def check_certificate(config: ServerConfig) -> None:
    """Raises ConfigError if HTTPS is configured and its files or its password cannot be used. uvicorn reads them once
    more."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile: set ssl_certfile too, the certificate of that key")
        return
    password = config.ssl_keyfile_password
    secret = "" if password is None else password.get_secret_value()  # with None, OpenSSL asks on the terminal
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, secret)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(
            f"ssl_certfile, ssl_keyfile or ssl_keyfile_password: the certificate cannot be used: {reason}"
        ) from error


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
                "(ulimit -n), or lower --max-connections",
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
            self._services.history.add(stats)
            if not stats.alive:
                self.exit_code = EXIT_ENGINE_DEAD
                self._services.lifecycle.expire()
                return True
        if self._drain_until is not None and self._services.engine.stats().paused:
            with suppress(EngineDeadError):  # the next check sees it
                await self._services.engine.resume()  # so that paused requests can finish
        return await super().on_tick(counter) or self._drained()

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
        reserve_open_files(config.connection_limit), config.header_timeout, config.write_timeout, config.access_log
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
        timeout_graceful_shutdown=CLOSING_S,
    )
