"""The sources of settings: the environment and a yaml file, each read into {key path: Setting}.

The key paths (`server.port`), their environment variables and their flags are derived from the sections of the
configuration. The error for a mistyped key or variable suggests a similar one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from mlx_parallm import blas
from mlx_parallm.config.sections import Config
from mlx_parallm.config.types import Flag, Program, Section
from mlx_parallm.errors import ConfigError

ENV_PREFIX = "MLX_PARALLM_"
API_KEY_VARIABLE = "MLX_PARALLM_API_KEY"
CLUSTER_TOKEN_VARIABLE = "MLX_PARALLM_CLUSTER_TOKEN"
_SHORT_VARIABLES = {API_KEY_VARIABLE: "server.api_key", CLUSTER_TOKEN_VARIABLE: "cluster.token"}
_OTHER_VARIABLES = frozenset({blas.ENV_VAR})
"""Variables that have the prefix but are not settings."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An unchecked value as the user wrote it, and where it was written: a flag, a variable or a file."""

    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its path (`server.port`), the section class that holds it, its field there, and what the field says
    of its flag."""

    path: str
    section: type[Section]
    field: FieldInfo
    flag: Flag

    @property
    def env_name(self) -> str:
        """The environment variable that sets it: `MLX_PARALLM_SERVER__PORT`."""
        return ENV_PREFIX + self.path.upper().replace(".", "__")

    @property
    def flags(self) -> dict[str, Program | None]:
        """Its flags, short names first, each with the program that alone has it; None: both have it."""
        flag = self.flag
        short = {name: flag.short_in or flag.only for name in (flag.name, flag.alias) if name}
        return {**short, f"--{self.path}": flag.only}

    @property
    def description(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def default_text(self) -> str:
        """The default value as yaml."""
        return yaml_text(self.section().model_dump(mode="json")[self.path.rpartition(".")[2]])

    @property
    def secret(self) -> bool:
        """Whether the value must not be shown."""
        return not self.field.repr


def yaml_text(value: Any) -> str:
    """A value as yaml on one line."""
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field that holds a section; None for a field that holds a value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _walk(section: type[Section], prefix: str = "", only: Program | None = None) -> Iterator[Key]:
    """The keys below a section. What a section's `Flag` says of the program holds for its keys."""
    for name, field in section.model_fields.items():
        flag = next((each for each in field.metadata if isinstance(each, Flag)), Flag())
        key = Key(prefix + name, section, field, replace(flag, only=flag.only or only))
        yield key
        if inner := section_of(field):
            yield from _walk(inner, f"{key.path}.", key.flag.only)


_ALL = tuple(_walk(Config))
KEYS = {key.path: key for key in _ALL if not section_of(key.field)}
SECTIONS = {key.path: section for key in _ALL if (section := section_of(key.field))}
_VARIABLES = {key.env_name: key.path for key in KEYS.values()} | _SHORT_VARIABLES


def suggest(path: str, known: Collection[str] = (*SECTIONS, *KEYS)) -> str | None:
    """The known path that is most like a mistyped one; None if there is none like it. One that is at most a section
    deeper is preferred."""
    near = [other for other in known if other.count(".") <= path.count(".") + 1]
    return _most_like(path, near) or _most_like(path, known)


def _most_like(path: str, known: Collection[str]) -> str | None:
    """It first looks for the same name in all sections, then for a similar name in the same section and in all
    sections, and then for a similar path."""
    parent, _, name = path.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    names = {other.rpartition(".")[2]: other for other in known}
    if name in names:
        return names[name]
    for candidates, wanted in ((siblings, name), (names, name), ({other: other for other in known}, path)):
        if close := get_close_matches(wanted, candidates, n=1, cutoff=0.7):
            return candidates[close[0]]
    return None


def from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    """The settings of all variables that start with MLX_PARALLM_. An empty variable counts as unset.

    Raises:
        ConfigError: a variable names no key, or two variables set the same key.
    """
    settings: dict[str, Setting] = {}
    problems: list[str] = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in _OTHER_VARIABLES or not environ[name]:
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
    """The settings of a yaml file. An empty file or section sets nothing.

    Raises:
        ConfigError: the file cannot be read, is not yaml, repeats a key or has an unknown one.
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
    except yaml.MarkedYAMLError as error:  # the error's own text would quote the line, which may hold a secret
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{file}: not valid yaml: {where}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid yaml: it must be UTF-8 text") from error
    except (ValueError, RecursionError) as error:  # likewise
        reason = "a number or a date in it is malformed" if isinstance(error, ValueError) else "it is nested too deeply"
        raise ConfigError(f"{file}: not valid yaml: {reason}") from error


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
    """Refuses a key that is written twice; yaml's own loader silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
