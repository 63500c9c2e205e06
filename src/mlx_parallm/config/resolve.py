"""Settings of every source, merged and checked into one frozen Config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mlx_parallm.config.checks import refuse_impossible, settle_training
from mlx_parallm.config.keys import KEYS
from mlx_parallm.config.sections import Config
from mlx_parallm.config.sources import Setting, from_environment, from_yaml
from mlx_parallm.errors import ConfigError


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
    layers = (dict(flags), from_environment(environ or {}), from_yaml(file) if file else {})
    settings = layers[2] | layers[1] | layers[0]
    try:
        config = Config.model_validate(_nest(settings))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, settings) for detail in error.errors())) from None
    config, followed = settle_training(config, layers)
    settings |= followed
    refuse_impossible(config, settings)
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
