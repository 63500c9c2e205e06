"""The keys of the configuration, derived from its sections: dotted paths, their fields, near misses."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from mlx_parallm.config.base import Section
from mlx_parallm.config.sections import Config

ENV_PREFIX = "MLX_PARALLM_"


def yaml_text(value: Any) -> str:
    """A value on one line of yaml."""
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section's class when `field` holds a section, not a value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


@dataclass(frozen=True, slots=True)
class Key:
    """One setting, `server.port`: the section that holds it and its field there."""

    path: str
    section: type[Section]
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def env_name(self) -> str:
        """The variable that sets it: `MLX_PARALLM_SERVER__PORT`."""
        return ENV_PREFIX + self.path.upper().replace(".", "__")

    @property
    def description(self) -> str:
        return self.field.description or ""

    @property
    def default_text(self) -> str:
        """The default as yaml."""
        return yaml_text(self.section().model_dump(mode="json")[self.name])

    @property
    def secret(self) -> bool:
        """True when the value may not be shown."""
        return not self.field.repr


def _walk(section: type[Section], prefix: str = "") -> Iterator[Key]:
    for name, field in section.model_fields.items():
        yield Key(prefix + name, section, field)
        if inner := section_of(field):
            yield from _walk(inner, f"{prefix}{name}.")


_ALL = tuple(_walk(Config))
KEYS = {key.path: key for key in _ALL if not section_of(key.field)}
SECTIONS = {key.path: section for key in _ALL if (section := section_of(key.field))}


def suggest(path: str, known: Collection[str] = (*SECTIONS, *KEYS)) -> str | None:
    """The known path that a mistyped one most likely means: a neighbour, the same name elsewhere, a like path."""
    parent, _, name = path.rpartition(".")
    neighbours = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == parent}
    names = {one.rpartition(".")[2]: one for one in known}
    for table, wanted in ((neighbours, name), (names, name), ({one: one for one in known}, path)):
        if close := get_close_matches(wanted, table, n=1, cutoff=0.7):
            return table[close[0]]
    return None
