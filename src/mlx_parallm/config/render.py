"""A configuration as a commented yaml file that reads back to the same configuration (secrets masked)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_parallm.config.base import Section
from mlx_parallm.config.keys import KEYS, section_of, yaml_text
from mlx_parallm.config.resolve import Resolved
from mlx_parallm.config.sections import Config

_HEADER = """\
# Configuration of MLX ParaLLM: mlx_parallm_serve --config server_config.yaml
#
# A flag wins over an environment variable, that over this file, and this file over the defaults.
# Every key has a variable: MLX_PARALLM_SERVER__PORT sets server.port, and lists are written a,b,c.
# Unknown keys are refused. Sizes are written 4GB (10^9 bytes) or 4GiB (2^30 bytes).
"""


def render(resolved: Resolved) -> str:
    """The whole configuration; a key that is not at its default says what set it."""
    values = resolved.config.model_dump(mode="json")
    return "\n".join([_HEADER, *_section(Config, values, "", resolved.sources)]).rstrip() + "\n"


def _section(
    section: type[Section], values: Mapping[str, Any], prefix: str, sources: Mapping[str, str]
) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, field in section.model_fields.items():
        path = prefix + name
        inner = section_of(field)
        yield from _comment((inner.__doc__ or "") if inner else KEYS[path].description, indent)
        if inner:
            yield f"{indent}{name}:"
            yield from _section(inner, values[name], f"{path}.", sources)
            if not prefix:
                yield ""
        else:
            source = f"  # from {sources[path]}" if path in sources else ""
            yield f"{indent}{name}: {yaml_text(values[name])}{source}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
