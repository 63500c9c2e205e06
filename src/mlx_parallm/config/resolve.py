"""Settings of every source, merged and checked into one frozen Config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mlx_parallm.config.keys import KEYS
from mlx_parallm.config.sections import Config
from mlx_parallm.config.sources import Setting, from_environment, from_yaml
from mlx_parallm.errors import ConfigError

# What nothing in this version does: the key, and what it would turn on. Each may hold its default only.
_UNAVAILABLE = {
    "server.mode": "training",
    "rl_training.enabled": "training",
    "rl_training.atropos_url": "rewards from Atropos",
    "rl_training.environment": "training environments",
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked configuration, and what set each key that is not at its default: {key path: source}."""

    config: Config
    sources: Mapping[str, str]


def resolve(
    flags: Mapping[str, Setting], environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Resolved:
    """Merges flags > environment > yaml file > defaults, and checks the result.

    Raises:
        ConfigError: one line per problem, each naming the key, the value, its source and the remedy.
    """
    settings = (from_yaml(file) if file else {}) | from_environment(environ or {}) | dict(flags)
    try:
        config = Config.model_validate(_nest(settings))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, settings) for detail in error.errors())) from None
    _refuse_unavailable(config, settings)
    return Resolved(config, {path: setting.source for path, setting in settings.items()})


def _nest(settings: Mapping[str, Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, setting in settings.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = setting.value
    return tree


def _explain(detail: ErrorDetails, settings: Mapping[str, Setting]) -> str:
    path = ".".join(str(part) for part in detail["loc"] if isinstance(part, str))
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    setting = settings.get(path)
    if setting is None:  # a rule across the keys of a section
        return f"{path}: {message}"
    got = "" if KEYS[path].secret else f", got {detail['input']!r}"
    return f"{path}: {message}{got} (from {setting.source})"


def _refuse_unavailable(config: Config, settings: Mapping[str, Setting]) -> None:
    problems = [
        f"{path}: not available in this version: {feature}; leave it at {KEYS[path].default_text} "
        f"(from {settings[path].source})"
        for path, feature in _UNAVAILABLE.items()
        if attrgetter(path)(config) != KEYS[path].field.default
    ]
    if problems:
        raise ConfigError("\n".join(problems))
