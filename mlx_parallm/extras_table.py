"""The extras: what few use, and where each takes part. Nothing else lists them, and the rest works without each.

An extra is a module or a package of `mlx_parallm.extras`. It takes part by functions of that module, which are found
here by their names:

routes(backend)                     the modules of its routes in the server of a `Backend`; None: those of every server
metrics(backend)                    the metrics that are read of it at each scrape
install(config, served, training)   what it adds to a process that trains. Requests find what it returns by the name of
                                    the extra (`Backend.extra`); None: they ask for nothing
serve(config, served, training)     the same for what only a server has; training has not started
kept(run, adapter)                  what it keeps of an adapter in the folder of a run
forget(run, adapter)                removes that

The others are asked for by a setting or a name, see `needed`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from mlx_parallm.errors import ConfigError

EXTRAS: dict[str, tuple[str, ...]] = {
    "people": ("routes", "install"),
    "competition": ("routes", "metrics", "install"),
    "averages": ("routes", "serve"),
    "reward_models": ("routes", "install"),
    "lessons": ("routes", "install", "serve", "kept", "forget"),
    "cluster": ("routes", "metrics"),
    "tinker": ("routes", "serve"),
    "ollama": ("routes",),
    "atropos": ("routes", "serve"),
    "curriculum": (),
    "engines": (),
    "ranks": (),
    "retrain": (),
    "service": (),
    "trackers": (),
    "verifiers": (),
}
"""The name of each extra, and the functions above that it has."""

_PACKAGE = "mlx_parallm."

_log = logging.getLogger(__name__)


def hooks(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of this name, each with its extra, as far as the extras are there."""
    for extra, functions in EXTRAS.items():
        if name in functions and (module := find(extra)) is not None:
            yield extra, getattr(module, name)


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
