"""What kinds of values a tool's argument may have, read from its JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}
_MOST_LEVELS = 8
"""Of references and alternatives; a schema deeper than that may be anything."""


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments; none given: it takes none."""
    parameters = tool["function"].get("parameters")
    return parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}


def properties_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """What a local `$ref` leads to; other schemas are themselves, and so is a reference that leads nowhere."""
    for _ in range(_MOST_LEVELS):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        found: object = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        if found is None:
            break
        schema = found
    return schema


def kinds(schema: object, root: Mapping[str, Any], levels: int = _MOST_LEVELS) -> frozenset[str]:
    """JSON's names of what `schema` admits, and perhaps more. `root`: where its references point."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or levels == 0:
        return _ANY
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_kind, values))
    if isinstance(said := schema.get("type"), str | list):
        return frozenset([said] if isinstance(said, str) else map(str, said))
    if isinstance(ways := schema.get("anyOf") or schema.get("oneOf"), list):
        return frozenset().union(*(kinds(way, root, levels - 1) for way in ways))
    return _ANY


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "null")


def plain(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool as parsers of mlx-lm understand it: an argument that may be a string is one, any other is JSON."""
    parameters = parameters_of(tool)
    properties = {
        key: {"type": "string" if "string" in kinds(schema, parameters) else "object"}
        for key, schema in properties_of(parameters).items()
    }
    function = {"name": tool["function"]["name"], "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}
