"""Builds the FastAPI app. This is the only module that knows all routes; `run` serves them.

request → middlewares (`http.middleware`) → body → schema → place in the queue → adapter version
        → prompt ids → engine.generate → answer → server-sent events or one JSON body
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from mlx_parallm import __version__
from mlx_parallm.config import ServerConfig
from mlx_parallm.core.adapters import AdapterClient
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.models import BaseModels
from mlx_parallm.core.trajectories import CollectingClient
from mlx_parallm.server.access.accounts import Accounts
from mlx_parallm.server.access.attempts import Attempts
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
from mlx_parallm.server.api.training import history as training_history
from mlx_parallm.server.api.training import route as training_routes
from mlx_parallm.server.api.training import schedule
from mlx_parallm.server.api.training.collected import route as collected_routes
from mlx_parallm.server.cluster import route as cluster_routes
from mlx_parallm.server.cluster.parts import ClusterParts
from mlx_parallm.server.dashboard import route as dashboard
from mlx_parallm.server.errors import install_handlers
from mlx_parallm.server.http.middleware import add_middlewares
from mlx_parallm.server.http.workers import Workers
from mlx_parallm.server.lifecycle import Lifecycle, SequenceGate, SleepSwitch
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.openapi import describe
from mlx_parallm.server.protocols import trainers
from mlx_parallm.server.protocols.generate import route as generate
from mlx_parallm.server.protocols.ollama import embed as ollama_embed
from mlx_parallm.server.protocols.ollama import models as ollama_models
from mlx_parallm.server.protocols.ollama import route as ollama_routes
from mlx_parallm.server.protocols.tokens import route as tokens
from mlx_parallm.server.routing import Endpoint
from mlx_parallm.server.services import Services

if TYPE_CHECKING:
    from mlx_parallm.cluster.node import Node
    from mlx_parallm.rl.service import TrainingService
    from mlx_parallm.server.traces.export import Traces

_log = logging.getLogger(__name__)


def _there(*names: str) -> tuple[ModuleType, ...]:
    """The modules with the routes of extras, as far as these extras are there."""
    found: list[ModuleType] = []
    for name in names:
        try:
            found.append(import_module(f"mlx_parallm.server.{name}"))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("mlx_parallm."):
                raise
            _log.warning("routes are left out, because %s is not there", error.name)
    return tuple(found)


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
    *_there("api.training.people", "api.training.compare", "api.training.average", "api.training.reward_model"),
    *_there("api.training.lessons"),
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
    *_there("protocols.tinker.route", "protocols.tinker.sampling", "protocols.tinker.weights"),
)
OLLAMA_ROUTES = (ollama_routes, ollama_embed, ollama_models)
ATROPOS_ROUTES = _there("protocols.atropos.route")


def create_app(
    engine: EngineClient,
    adapters: AdapterClient,
    training: TrainingService | None,
    models: BaseModels,
    config: ServerConfig,
    *,
    extras: Mapping[str, Any] | None = None,
    traces: Traces | None = None,
    cluster: Node | None = None,
    collection: CollectingClient | None = None,
) -> FastAPI:
    """The HTTP server of these parts, which routes find on `app.state.services` (a `Services`).

    Args:
        training: None if the server does not train.
        extras: those that are installed, by name; see `app.extras`.
        traces: makes the spans of requests; None: they are not traced.
        cluster: the cluster that this server is a node of.
        collection: takes requests to be collected; None: `training` does.
    """
    extras = extras or {}
    parts = None if cluster is None else ClusterParts.of(cluster, engine, models.first.card.name)
    engine = engine if parts is None else parts.engine
    gate = SequenceGate(config.max_batch_size + config.max_queued)
    key = config.api_key
    token = None if cluster is None else cluster.token
    ring = KeyRing(None if key is None else key.get_secret_value(), config.keys_file, token)
    accounts, attempts, sessions = Accounts(ring), Attempts(ring), Sessions(ring)
    model_names = [status.name for status in models.statuses()]
    metrics = ServerMetrics(engine, adapters, training, gate, accounts, model_names, parts, extras.get("competition"))
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
        attempts,
        sessions,
        started_at=int(time.time()),
        extras=extras,
        collection=collection if collection is not None or training is None else training.trajectories,
        cluster=parts,
    )
    modules: tuple[ModuleType, ...] = (*ROUTES, *(OLLAMA_ROUTES if config.ollama_api else ()))
    modules += (dashboard,) if config.dashboard else ()
    modules += ATROPOS_ROUTES if "atropos" in extras else (root,)
    routes = _add_routes(app, modules)
    install_handlers(app)
    add_middlewares(app, config, metrics, attempts, sessions, traces)
    app.openapi = partial(describe, app, routes, config.strict_fields)  # type: ignore[method-assign]
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of a server that serves every API. No model is loaded."""
    app = _empty_app()
    return describe(app, _add_routes(app, (*ROUTES, *OLLAMA_ROUTES, *ATROPOS_ROUTES)), strict_fields=False)


def _empty_app() -> FastAPI:
    # FastAPI's own pages load scripts from a CDN, and its routes do not say a role; `api.ops` has both.
    return FastAPI(title="MLX ParaLLM", version=__version__, openapi_url=None, redirect_slashes=False)


def _add_routes(app: FastAPI, modules: Iterable[ModuleType]) -> list[Endpoint]:
    """Adds all routes of the modules to the app, and returns them."""
    routes = [route for module in modules for route in module.router.routes]
    app.router.routes.extend(routes)
    return routes
