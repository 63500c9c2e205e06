"""Where settings come from: the environment and a yaml file, each read into {key path: Setting}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from mlx_parallm import blas
from mlx_parallm.config.keys import ENV_PREFIX, KEYS, SECTIONS, suggest
from mlx_parallm.errors import ConfigError

API_KEY_VARIABLE = "MLX_PARALLM_API_KEY"
_VARIABLES = {key.env_name: key.path for key in KEYS.values()} | {API_KEY_VARIABLE: "server.api_key"}
_NOT_SETTINGS = frozenset({blas.ENV_VAR})


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written, unchecked, and what set it: a flag, a variable or a file."""

    value: object
    source: str


def from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    """Settings of variables that start with MLX_PARALLM_; an empty one counts as unset.

    Raises:
        ConfigError: a variable names no key, or two variables set the same one.
    """
    settings: dict[str, Setting] = {}
    problems: list[str] = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in _NOT_SETTINGS or not environ[name]:
            continue
        path = _VARIABLES.get(name)
        if path is None:
            problems.append(f"{name}: unknown variable; {_variable_hint(name)}")
        elif path in settings:
            problems.append(f"{name}: {settings[path].source} sets {path} too; keep one of them")
        else:
            settings[path] = Setting(environ[name], name)
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _variable_hint(name: str) -> str:
    path = suggest(name.removeprefix(ENV_PREFIX).lower().replace("__", "."), tuple(KEYS))
    return f"did you mean {KEYS[path].env_name}?" if path else "remove it"


def from_yaml(file: Path) -> dict[str, Setting]:
    """Settings of a yaml file; an empty file or section sets nothing.

    Raises:
        ConfigError: the file cannot be read, is not yaml, repeats a key or has one that is unknown.
    """
    settings: dict[str, Setting] = {}
    problems: list[str] = []
    for path, value in _leaves(_read(file), "", file):
        if path in KEYS:
            settings[path] = Setting(value, str(file))
        else:
            known = suggest(path)
            hint = f"did you mean {known}?" if known else "remove it"
            problems.append(f"{path}: unknown key; {hint} (in {file})")
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _read(file: Path) -> object:
    try:
        return yaml.load(file.read_bytes(), _UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{file}: the configuration file cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:  # the error's own text would quote the line, and so perhaps a secret
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{file}: not valid yaml: {where}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid yaml: it must be UTF-8 text") from error


def _leaves(node: object, path: str, file: Path) -> Iterator[tuple[str, object]]:
    if path and path not in SECTIONS:
        yield path, node
        return
    if node is None:
        return
    if not isinstance(node, Mapping):
        raise ConfigError(f"{path or file}: must hold `key: value` lines, not {type(node).__name__} (in {file})")
    for name, value in node.items():
        if "." in str(name):
            raise ConfigError(f"{name}: write it nested, one name a line, not with dots (in {file})")
        yield from _leaves(value, f"{path}.{name}" if path else str(name), file)


class _UniqueKeyLoader(yaml.SafeLoader):
    """yaml's own loader keeps the last of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
