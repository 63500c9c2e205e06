"""The TOML file of retrain (0.3.2), as far as it says how samples are drawn. Its own reader is `retrain.config`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from mlx_parallm.config.inference import EngineKind
from mlx_parallm.errors import ConfigError

T = TypeVar("T")

_OWN_ENGINE = "pytorch"
_IN_PROCESS_MAX = "max"
_AUTO = "auto"
_DTYPES = {name: name for name in (_AUTO, "bfloat16", "float16", "float32")}
_DTYPES |= {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_KV_BITS = {"int8": 8, "int4": 4}
_KV_DTYPES = _DTYPES | {name: name for name in _KV_BITS}
_ATTENTION = {"default": "auto", "kernel": "kernel", "paged": "kernel", "flash": "kernel", "plain": "plain"}
_ATTENTION |= {"flash_attention_2": "kernel", "eager": "plain", "sdpa": "plain"}
"""Names of kernels, and `server.attention`: which of them a name means here. retrain itself reads no value of these
three keys."""


@dataclass(frozen=True, slots=True)
class RetrainFile:
    """What a file asks for. None and 0 are retrain's own defaults.

    Attributes:
        model: a directory or a hub id.
        lora_alpha: 0 means twice the rank.
        keys: the section `[inference]`, as keyword arguments of `configure`.
        held: keys of `[inference]` with the type of numbers that they ask for. It can only be checked: a model is held
            in the type of its files, and on a CPU in float32.
    """

    model: str | None = None
    lora_rank: int | None = None
    lora_alpha: float = 0.0
    seed: int = 0
    keys: Mapping[str, object] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)

    def check(self, dtype: str) -> None:
        """Raises ConfigError: the model's type of numbers is not the one that the file asks for."""
        for key, asked in self.held.items():
            if asked != dtype:
                raise ConfigError(
                    f"inference.{key}: {asked} is asked for, and the model is held in {dtype} here, the type of its "
                    f'files, or float32 on a CPU; write "{_AUTO}"'
                )


def read_retrain(file: Path) -> RetrainFile:
    """Reads a configuration file of retrain.

    Raises:
        ConfigError: it cannot be read, or its section `[inference]` asks for what this project does not have.
    """
    tree = _read(file)
    model, training, lora = (_section(tree, name, file) for name in ("model", "training", "lora"))
    asked = RetrainFile(
        _value(model, "model", (str,), file),
        _value(model, "lora_rank", (int,), file),
        _value(lora, "alpha", (int, float), file) or 0.0,
        max(0, _value(training, "seed", (int,), file) or 0),
    )
    return _with_inference(asked, _section(tree, "inference", file), file)


def _with_inference(asked: RetrainFile, section: Mapping[str, object], file: Path) -> RetrainFile:
    """What the section `[inference]` adds."""
    keys: dict[str, object] = {}
    held: dict[str, str] = {}
    if section.get("engine") == _IN_PROCESS_MAX and not section.get("url"):
        raise ConfigError(
            f"{file}: inference.engine: without url, retrain runs MAX in its own process, which has no place here; let "
            f'retrain do that, or write "{_OWN_ENGINE}", which this engine stands in for'
        )
    for name, value in section.items():
        if name == "engine":
            keys["inference__engine"] = EngineKind.SHARED.value if value == _OWN_ENGINE else value
        elif name == "url":
            keys |= {"inference__url": value} if value else {}
        elif name == "prefix_caching":
            keys["server__prefix_cache"] = value
        elif name == "attention_kernel":
            keys["server__attention"] = _one_of(_ATTENTION, name, value, file)
        elif name in ("dtype", "kv_cache_dtype"):
            dtype = _one_of(_DTYPES if name == "dtype" else _KV_DTYPES, name, value, file)
            if dtype in _KV_BITS:
                keys["server__kv_bits"] = _KV_BITS[dtype]
            elif dtype != _AUTO:
                held[name] = dtype
        else:
            raise ConfigError(f"{file}: inference.{name}: unknown key; remove it")
    return replace(asked, keys=keys, held=held)


def _one_of(meanings: Mapping[str, str], name: str, value: object, file: Path) -> str:
    """What a value means here. Raises ConfigError: it means nothing here."""
    meaning = meanings.get(value) if isinstance(value, str) else None
    if meaning is None:
        raise ConfigError(
            f"{file}: inference.{name}: {value!r} is not available here; give one of {', '.join(meanings)}"
        )
    return meaning


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: the configuration file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, and of what is nested too deeply
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
