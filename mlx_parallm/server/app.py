"""Builds the FastAPI app. This is the only module that knows all routes.

request → middlewares (`http.middleware`) → body → schema → place in the queue → adapter version
        → prompt ids → engine.generate → answer → server-sent events or one JSON body
"""

from __future__ import annotations

import time
from functools import partial

from fastapi import FastAPI
from starlette.routing import Route

from mlx_parallm import __version__
from mlx_parallm.config import ServerConfig
from mlx_parallm.core import AdapterClient, EngineClient, ModelCard, TextTokenizer, TrainingClient
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.server.api import completions, control, models, ops
from mlx_parallm.server.api.adapters import route as adapter_routes
from mlx_parallm.server.api.chat import route as chat
from mlx_parallm.server.api.responses import route as responses
from mlx_parallm.server.api.responses.conversation import ResponseStore
from mlx_parallm.server.api.training import route as training_routes
from mlx_parallm.server.api.training import schedule
from mlx_parallm.server.errors import install_handlers
from mlx_parallm.server.http.middleware import add_middlewares
from mlx_parallm.server.http.workers import Workers
from mlx_parallm.server.lifecycle import Lifecycle, SequenceGate, SleepSwitch
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.openapi import describe
from mlx_parallm.server.services import Services

ROUTES = (
    completions,
    chat,
    responses,
    models,
    adapter_routes,
    training_routes,
    schedule,
    control,
    ops,
)

GENERIC_NAME = "base-model"
"""A name of the served model on every server."""


def create_app(
    engine: EngineClient,
    adapters: AdapterClient,
    training: TrainingClient | None,
    tokenizer: TextTokenizer,
    card: ModelCard,
    config: ServerConfig,
) -> FastAPI:
    """The HTTP server of `engine`, `adapters` and `training` (None if the server does not train). Routes find these
    parts on `app.state.services` (a `Services`)."""
    gate = SequenceGate(config.max_batch_size + config.max_queued)
    metrics = ServerMetrics(engine, adapters, training, gate)
    # FastAPI's own documentation pages load scripts from a CDN; `api.ops` has one that does not.
    app = FastAPI(title="MLX ParaLLM", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.services = Services(
        engine,
        adapters,
        training,
        tokenizer,
        LLCompiler(tokenizer, card.vocab_size),
        card,
        config,
        Lifecycle(),
        gate,
        SleepSwitch(engine, gate),
        metrics,
        ResponseStore(),
        Workers(config.body_timeout),
        started_at=int(time.time()),
        model_names=frozenset({*card.names, GENERIC_NAME}),
    )
    for module in ROUTES:
        app.include_router(module.router)
    routes = [route for module in ROUTES for route in module.router.routes if isinstance(route, Route)]
    install_handlers(app, routes)
    add_middlewares(app, config, metrics)
    app.openapi = partial(describe, app, routes, config.strict_fields)  # type: ignore[method-assign]
    return app
