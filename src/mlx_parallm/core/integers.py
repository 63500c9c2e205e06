"""JSON schemas whose integers stay within 64 bits: programs that read an answer seldom hold longer ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST, MOST = -(2**63) + 1024, 2**63 - 1
"""llguidance reads bounds as doubles, and cannot follow a minimum of -2**63: `LEAST` is the next double above it."""

LARGEST_DIVISOR = 1000
"""Bounds on multiples of more than this make a grammar too large to follow, so they are left out."""

_LITERAL = frozenset({"enum", "const", "default", "examples", "not", "if"})
"""Keywords whose value is left alone: it is no schema, or narrowing it would allow more."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value is a schema for each name."""


def with_bounded_integers(schema: Any) -> Any:
    """The schema, each integer in it from `LEAST` to `MOST`. Constants stay as they are."""
    if isinstance(schema, list):
        return [with_bounded_integers(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _value(key, value) for key, value in schema.items()}
    return {**inner, **_bounds(schema)} if _is_integer(schema.get("type")) else inner


def _value(key: str, value: Any) -> Any:
    if key in _LITERAL:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: with_bounded_integers(part) for name, part in value.items()}
    return with_bounded_integers(value)


def _is_integer(kind: object) -> bool:
    """Whether no number but an integer is allowed: an integer, or something that is no number."""
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)


def _bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds that are missing, and the lower one that reaches too far (llguidance itself clips an upper one)."""
    if not _small(schema.get("multipleOf", 1)):
        return {}
    bounds = {}
    lower = [schema[word] for word in ("minimum", "exclusiveMinimum") if word in schema]
    if not lower or all(_below(value) for value in lower):
        bounds = {"minimum": LEAST, **({"exclusiveMinimum": LEAST} if "exclusiveMinimum" in schema else {})}
    if not schema.keys() & {"maximum", "exclusiveMaximum"}:
        bounds["maximum"] = MOST
    return bounds


def _small(divisor: object) -> bool:
    return isinstance(divisor, int | float) and divisor <= LARGEST_DIVISOR


def _below(value: object) -> bool:
    return isinstance(value, int | float) and value < LEAST
