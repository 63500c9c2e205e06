"""The extras: what few use, and where each takes part. Nothing else lists them, and the rest works without each.

An extra is a module or a package of `mlx_parallm.extras`. It takes part by modules and functions of its own, which are
imported when they are asked for:

routes       modules with routes of the server
served_if    (backend) -> bool: whether this server has these routes
metrics      (backend) -> Iterator[Metric]: those that each scrape reads
install      (training): adds to what trains, in every process that trains. Requests find what it returns, if that is
             not None, by the name of the extra (`Backend.extra`)
serve        (config, served, training): the same in a server, after that, and before training starts
kept         (run, adapter) -> Iterator[KeptPart]: what it keeps of an adapter in the folder of a run
forget       (run, adapter): removes that

Others are asked for by a setting or a name: see `find` and `needed`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.server.backend import Backend

EXTRAS: dict[str, dict[str, str]] = {
    "people": {"routes": "route", "install": "service:install"},
    "competition": {"routes": "route", "install": "service:install", "metrics": "metric_table:metrics"},
    "forgetting": {"routes": "route", "serve": "service:serve"},
    "averages": {"routes": "route", "serve": "service:serve"},
    "why": {"routes": "route", "serve": "service:serve"},
    "reward_models": {"routes": "route", "serve": "trainer:serve"},
    "lessons": {
        **{"routes": "route", "install": "record:install", "serve": "service:serve"},
        **{"kept": "record:kept", "forget": "record:forget_lesson"},
    },
    "cluster": {"routes": "http.route", "metrics": "http.metric_table:metrics"},
    "tinker": {"routes": "route sampling weights", "serve": "service:serve"},
    "ollama": {"routes": "route embed models", "served_if": "route:is_served"},
    "atropos": {"routes": "route", "served_if": "route:is_served", "serve": "registration:serve"},
    "curriculum": {},
    "engines": {},
    "files": {},
    "gguf": {},
    "hub": {},
    "ranks": {},
    "retrain": {},
    "service": {},
    "supervise": {"metrics": "child:metrics"},
    "trackers": {},
    "verifiers": {},
}

_PACKAGE = "mlx_parallm."

_log = logging.getLogger(__name__)


def hooks(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What takes part here, each with its extra, as far as the extras are there."""
    for extra, parts in EXTRAS.items():
        if name in parts:
            path, _, function = parts[name].partition(":")
            if (module := find(f"{extra}.{path}")) is not None:
                yield extra, getattr(module, function)


def offered(name: str, *parts: object) -> dict[str, Any]:
    """Calls what takes part here with these arguments. Returns what requests may ask for, by extra."""
    results = {extra: call(*parts) for extra, call in hooks(name)}
    return {extra: result for extra, result in results.items() if result is not None}


def routes(backend: Backend | None) -> Iterator[ModuleType]:
    """The modules with the routes of extras that the server of a backend has; None: those of all."""
    unwanted = {extra for extra, served_if in hooks("served_if") if backend is not None and not served_if(backend)}
    for extra, parts in EXTRAS.items():
        if extra not in unwanted:
            modules = (find(f"{extra}.{path}") for path in parts.get("routes", "").split())
            yield from (module for module in modules if module is not None)


def find(extra: str) -> Any:
    """A module of the extras by its path, such as `ranks` or `ranks.running`. None: it is not there, which is logged,
    because a whole installation has them all."""
    try:
        return import_module(f"{_PACKAGE}extras.{extra}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        _log.warning("the extra %s is left out, because %s is not there", extra, error.name)
        return None


def needed(extra: str, setting: str) -> Any:
    """The same for what a setting asks for. Raises ConfigError: it is not there."""
    module = find(extra)
    if module is None:
        raise ConfigError(f"{setting}: this needs mlx_parallm.extras.{extra}, which is not there")
    return module
