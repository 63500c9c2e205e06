"""Builds the FastAPI app. This is the only module that knows all routes; `run` serves them.

request → middlewares (`entry`) → body → schema → place in the queue → adapter version
        → prompt ids → engine.generate → answer → server-sent events or one JSON body
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from mlx_parallm import __version__
from mlx_parallm.optional_packages import is_extra
from mlx_parallm.server.api import completions, control, login, models, ops, root, stats, usage
from mlx_parallm.server.api.adapters import route as adapter_routes
from mlx_parallm.server.api.chat import route as chat
from mlx_parallm.server.api.messages import route as messages
from mlx_parallm.server.api.pooling import embeddings, scores
from mlx_parallm.server.api.responses import route as responses
from mlx_parallm.server.api.training import history as training_history
from mlx_parallm.server.api.training import route as training_routes
from mlx_parallm.server.api.training import schedule
from mlx_parallm.server.api.training.collected import route as collected_routes
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.dashboard import route as dashboard
from mlx_parallm.server.entry import add_middlewares
from mlx_parallm.server.errors import install_handlers
from mlx_parallm.server.openapi import describe
from mlx_parallm.server.protocols import trainers
from mlx_parallm.server.protocols.generate import route as generate
from mlx_parallm.server.protocols.tokens import route as tokens
from mlx_parallm.server.routing import Endpoint
from mlx_parallm.server.services import Services

if TYPE_CHECKING:
    from mlx_parallm.server.traces import Traces

_log = logging.getLogger(__name__)


def _there(*names: str) -> tuple[ModuleType, ...]:
    """The modules with the routes of extras, as far as these extras are there."""
    found: list[ModuleType] = []
    for name in names:
        try:
            found.append(import_module(f"mlx_parallm.extras.{name}"))
        except ModuleNotFoundError as error:
            if not is_extra(error):
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
    *_there("people.route", "competition.route", "averages.route", "reward_models.route", "lessons.route"),
    schedule,
    control,
    *_there("cluster.http.route"),
    usage,
    stats,
    login,
    ops,
    tokens,
    generate,
    trainers,
    *_there("tinker.route", "tinker.sampling", "tinker.weights"),
)
OLLAMA_ROUTES = _there("ollama.route", "ollama.embed", "ollama.models")
ATROPOS_ROUTES = _there("atropos.route")


def create_app(backend: Backend, traces: Traces | None = None) -> FastAPI:
    """The HTTP server of a backend. Routes find it on `app.state.services` (a `Services`).

    Args:
        traces: makes the spans of requests; None: they are not traced.
    """
    app, config, services = _empty_app(), backend.config, Services.of(backend)
    app.state.services = services
    modules: tuple[ModuleType, ...] = (*ROUTES, *(OLLAMA_ROUTES if config.ollama_api else ()))
    modules += (dashboard,) if config.dashboard else ()
    modules += (root,) if backend.extra("atropos") is None else ATROPOS_ROUTES
    routes = _add_routes(app, modules)
    install_handlers(app)
    add_middlewares(app, services, traces)
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
