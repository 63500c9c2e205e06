"""Builds the FastAPI app. This is the only module that knows all routes; `run` serves them.

request → middlewares (`entry`) → body → schema → place in the queue → adapter version
        → prompt ids → engine.generate → answer → server-sent events or one JSON body
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from mlx_parallm import __version__, extras_table
from mlx_parallm.server.api import (
    adapters,
    chat,
    completions,
    control,
    embeddings,
    generate,
    login,
    models,
    ops,
    root,
    schedule,
    scores,
    stats,
    tokens,
    training,
    trajectories,
    update,
)
from mlx_parallm.server.api.messages import route as messages
from mlx_parallm.server.api.responses import route as responses
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.dashboard import route as dashboard
from mlx_parallm.server.entry import add_middlewares
from mlx_parallm.server.errors import install_handlers
from mlx_parallm.server.openapi import describe
from mlx_parallm.server.routing import Endpoint
from mlx_parallm.server.services import Services

if TYPE_CHECKING:
    from mlx_parallm.server.traces import Traces

ROUTES = (
    completions,
    chat,
    responses,
    messages,
    embeddings,
    scores,
    models,
    adapters,
    update,
    training,
    trajectories,
    schedule,
    control,
    stats,
    login,
    ops,
    tokens,
    generate,
)
"""Those of every server, without the routes of extras."""


def all_routes(backend: Backend | None = None) -> tuple[ModuleType, ...]:
    """The modules with the routes of a server's API; None: those of a server that serves every API."""
    return (*ROUTES, *extras_table.routes(backend))


def create_app(backend: Backend, traces: Traces | None = None) -> FastAPI:
    """The HTTP server of a backend. Routes find it on `app.state.services` (a `Services`).

    Args:
        traces: makes the spans of requests; None: they are not traced.
    """
    app, config, services = _empty_app(), backend.config, Services.of(backend)
    app.state.services = services
    routes = _add_routes(app, (*all_routes(backend), *((dashboard,) if config.dashboard else ()), root))
    install_handlers(app)
    add_middlewares(app, services, traces)
    app.openapi = partial(describe, app, routes, config.strict_fields)  # type: ignore[method-assign]
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of a server that serves every API. No model is loaded."""
    app = _empty_app()
    return describe(app, _add_routes(app, all_routes()), strict_fields=False)


def _empty_app() -> FastAPI:
    # FastAPI's own pages load scripts from a CDN, and its routes do not say a role; `api.ops` has both.
    return FastAPI(title="MLX ParaLLM", version=__version__, openapi_url=None, redirect_slashes=False)


def _add_routes(app: FastAPI, modules: Iterable[ModuleType]) -> list[Endpoint]:
    """Adds all routes of the modules to the app, and returns them. What two modules have is the first one's."""
    routes: list[Endpoint] = []
    for module in modules:
        taken = [(route.path, route.methods) for route in routes]
        routes += [route for route in module.router.routes if (route.path, route.methods) not in taken]
    app.router.routes.extend(routes)
    return routes
