"""Builds the FastAPI app from its parts. The only place that knows all the routes and middlewares."""

from __future__ import annotations

import time
from functools import partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from mlx_parallm import __version__
from mlx_parallm.core import AdapterClient, EngineClient, ModelCard, TextTokenizer, TrainingClient
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.server.errors import install_handlers
from mlx_parallm.server.exchange import IGNORED_FIELDS, LORA_ADAPTER, REQUEST_ID
from mlx_parallm.server.lenient import LenientMiddleware
from mlx_parallm.server.lifecycle import Lifecycle
from mlx_parallm.server.limits import SequenceGate
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.openapi import describe
from mlx_parallm.server.request_log import ExchangeMiddleware
from mlx_parallm.server.response_store import ResponseStore
from mlx_parallm.server.routes import adapters as adapter_routes
from mlx_parallm.server.routes import (
    chat,
    checkpoints,
    completions,
    docs,
    info,
    lora,
    models,
    ops,
    pause,
    response_inputs,
    responses,
    schedule,
    sleep,
    tokenize,
    training_debug,
)
from mlx_parallm.server.routes import training as training_routes
from mlx_parallm.server.scheduling import Rescheduler
from mlx_parallm.server.security import ApiKeyMiddleware, HostOriginMiddleware
from mlx_parallm.server.services import Services
from mlx_parallm.server.settings import ServerSettings
from mlx_parallm.server.sleeping import SleepSwitch
from mlx_parallm.server.workers import Workers

ROUTES = (
    completions,
    chat,
    response_inputs,
    responses,
    models,
    lora,
    adapter_routes,
    checkpoints,
    training_routes,
    schedule,
    training_debug,
    pause,
    sleep,
    tokenize,
    info,
    ops,
    docs,
)


def create_app(
    engine: EngineClient,
    adapters: AdapterClient,
    training: TrainingClient,
    tokenizer: TextTokenizer,
    card: ModelCard,
    settings: ServerSettings,
) -> FastAPI:
    """The HTTP face of `engine`, `adapters` and `training` (`NoTraining` where there is none).

    Its parts are on `app.state.services` (a `Services`).
    """
    gate = SequenceGate(settings.max_batch_size + settings.max_queued)
    metrics = ServerMetrics(engine, adapters, training, gate)
    # FastAPI's own pages load scripts from a CDN; `docs` is ours.
    app = FastAPI(
        title="MLX ParaLLM",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = Services(
        engine,
        adapters,
        training,
        tokenizer,
        LLCompiler(tokenizer, card.vocab_size),
        card,
        settings,
        Lifecycle(),
        gate,
        SleepSwitch(engine, gate),
        Rescheduler(engine),
        metrics,
        ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes),
        Workers(settings.body_timeout_s),
        started_at=int(time.time()),
    )
    for routes in ROUTES:
        app.include_router(routes.router)
    install_handlers(app, [route for routes in ROUTES for route in routes.router.routes if isinstance(route, Route)])
    _add_middlewares(app, settings, metrics)
    app.openapi = partial(describe, app, settings.strict_fields)  # type: ignore[method-assign]
    return app


def _add_middlewares(app: FastAPI, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """The last one added sees a request first: log and id → HEAD and slash → Host and Origin → CORS → key → routes."""
    if settings.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED_FIELDS, LORA_ADAPTER],
        )
    app.add_middleware(HostOriginMiddleware, allowed_hosts=settings.allowed_hosts, cors_origins=settings.cors_origins)
    app.add_middleware(LenientMiddleware)
    app.add_middleware(ExchangeMiddleware, metrics=metrics, access_log=settings.access_log)
