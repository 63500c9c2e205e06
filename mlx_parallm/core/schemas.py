"""What is enforced of a JSON schema, which is a little more and a little less than it says.

Every integer is bounded. Keywords that constrain nothing are left out, and so are the alternatives of an `anyOf` that
cannot be enforced: what is left describes texts that the whole schema allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LEAST, MOST = -(2**63) + 1024, 2**63 - 1
"""Bounds of integers in answers, because most programs that read JSON hold integers in 64 bits. llguidance reads bounds
as doubles and cannot enforce a minimum of -2**63, so `LEAST` is the next double above it."""

LARGEST_DIVISOR = 1000
"""Integers with a larger `multipleOf` get no bounds, because these would make the grammar too large."""

_LITERAL = frozenset({"enum", "const", "default", "examples", "not", "if"})
"""Keywords whose value is left unchanged: it is no schema, or (`not`, `if`) bounds there would allow more values."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names to schemas."""

_ANYTHING: tuple[object, ...] = (True, {})
"""Schemas that allow every value."""

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""The formats of texts that llguidance enforces. Others are annotations, as JSON Schema 2020-12 calls them."""

_LOOKING_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
"""Parts of regular expressions that look ahead or back, which llguidance cannot do."""


def enforceable_schema(schema: Any) -> Any:
    """A copy of a JSON schema for llguidance. Every integer is between `LEAST` and `MOST`. Constants stay as they are.

    Raises:
        ValueError: what it asks of an object's number of properties cannot be enforced.
    """
    if isinstance(schema, list):
        return [enforceable_schema(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    _check_number_of_properties(schema)
    inner = {key: _inner(key, value) for key, value in schema.items() if not _constrains_nothing(key, schema)}
    return {**inner, **_missing_bounds(schema)} if _is_integer(schema.get("type")) else inner


def unknown_format(schema: Any) -> str:
    """A format in a JSON schema that is not enforced; empty if there is none."""
    if isinstance(schema, list):
        return next(filter(None, map(unknown_format, schema)), "")
    if not isinstance(schema, Mapping):
        return ""
    if isinstance(name := schema.get("format"), str) and name not in FORMATS:
        return name
    inner = (
        list(value.values()) if key in _NAMED and isinstance(value, Mapping) else value
        for key, value in schema.items()
        if key not in _LITERAL
    )
    return next(filter(None, map(unknown_format, inner)), "")


def _check_number_of_properties(schema: Mapping[str, Any]) -> None:
    """llguidance counts members, and names that a schema does not list may repeat. Readers of JSON keep one of equal
    names."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    known = isinstance(least, int) and isinstance(required, list | tuple)
    if known and least > max(1, len({*map(str, required)})):
        raise ValueError(f"minProperties {least} needs as many names in required")


def _constrains_nothing(key: str, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword allows whatever the others of its schema allow."""
    value = schema[key]
    match key:
        case "propertyNames":
            return value in _ANYTHING or value == {"type": "string"}
        case "unevaluatedProperties" | "unevaluatedItems":
            return value in _ANYTHING
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return not value
        case "if":
            return not schema.keys() & {"then", "else"}
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "x-guidance":
            return True
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "contains":
            counts = schema.keys() & {"minContains", "maxContains"}
            least = schema.get("minItems")
            return value in _ANYTHING and not counts and isinstance(least, int) and least >= 1
    return False


def _inner(key: str, value: Any) -> Any:
    if key in _LITERAL:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: enforceable_schema(part) for name, part in value.items()}
    if key == "anyOf" and isinstance(value, list):
        value = [part for part in value if not _looks_around(part)] or value
    return enforceable_schema(value)


def _looks_around(schema: object) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and _LOOKING_AROUND.search(pattern) is not None


def _is_integer(kind: object) -> bool:
    """Whether a schema's `type` allows integers and no other numbers."""
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)


def _missing_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds that an integer's schema lacks, and `LEAST` to replace a lower bound below it.

    llguidance itself clips an upper bound that is too high.
    """
    divisor = schema.get("multipleOf", 1)
    if not (isinstance(divisor, int | float) and divisor <= LARGEST_DIVISOR):
        return {}
    bounds = {}
    lower = [schema[word] for word in ("minimum", "exclusiveMinimum") if word in schema]
    if all(isinstance(value, int | float) and value < LEAST for value in lower):
        bounds = {"minimum": LEAST, **({"exclusiveMinimum": LEAST} if "exclusiveMinimum" in schema else {})}
    if not schema.keys() & {"maximum", "exclusiveMaximum"}:
        bounds["maximum"] = MOST
    return bounds
