"""The TOML file of retrain (0.3.2), as far as it says how samples are drawn. Its own reader is `retrain.config`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mlx_parallm.config.inference import EngineKind
from mlx_parallm.errors import ConfigError

T = TypeVar("T")

_OWN_ENGINE = "pytorch"
_WITHOUT_EFFECT = {"attention_kernel": "default", "dtype": "auto", "kv_cache_dtype": "auto"}
"""Keys of `[inference]` that are taken only with these values, which are their defaults there."""


@dataclass(frozen=True, slots=True)
class RetrainFile:
    """What a file asks for. None and 0 are retrain's own defaults.

    Attributes:
        model: a directory or a hub id.
        lora_alpha: 0 means twice the rank.
        keys: the section `[inference]`, as keyword arguments of `configure`.
    """

    model: str | None = None
    lora_rank: int | None = None
    lora_alpha: float = 0.0
    seed: int = 0
    keys: Mapping[str, object] = field(default_factory=dict)


def read_retrain(file: Path) -> RetrainFile:
    """Reads a configuration file of retrain.

    Raises:
        ConfigError: it cannot be read, or its section `[inference]` asks for what this project does not have.
    """
    tree = _read(file)
    model, training, lora = (_section(tree, name, file) for name in ("model", "training", "lora"))
    return RetrainFile(
        _value(model, "model", (str,), file),
        _value(model, "lora_rank", (int,), file),
        _value(lora, "alpha", (int, float), file) or 0.0,
        max(0, _value(training, "seed", (int,), file) or 0),
        _inference_keys(_section(tree, "inference", file), file),
    )


def _inference_keys(section: Mapping[str, object], file: Path) -> dict[str, object]:
    keys: dict[str, object] = {}
    for name, value in section.items():
        if name == "engine":
            keys["inference__engine"] = EngineKind.SHARED.value if value == _OWN_ENGINE else value
        elif name == "url":
            keys |= {"inference__url": value} if value else {}
        elif name == "prefix_caching":
            keys["server__prefix_cache"] = value
        elif name not in _WITHOUT_EFFECT:
            raise ConfigError(f"{file}: inference.{name}: unknown key; remove it")
        elif value != _WITHOUT_EFFECT[name]:
            raise ConfigError(f"{file}: inference.{name}: {value!r} is not available here; leave it out")
    return keys


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: the configuration file cannot be read: {error.strerror}") from error
    except ValueError as error:  # of TOML, and of UTF-8
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def _section(tree: Mapping[str, object], name: str, file: Path) -> dict[str, object]:
    section = tree.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: {name} must be a section, [{name}]")
    return section


def _value(section: Mapping[str, object], name: str, types: tuple[type[T], ...], file: Path) -> T | None:
    value = section.get(name)
    if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
        raise ConfigError(f"{file}: {name}: must be {' or '.join(kind.__name__ for kind in types)}, got {value!r}")
    return value
