"""What of a JSON schema is left out because it constrains nothing, and what is refused as it cannot be enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from walks import follows

from mlx_parallm.core.grammar import Grammar, GrammarKind, GrammarSpec
from mlx_parallm.core.schemas import FORMATS, unknown_format
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.grammar.compiler import LLCompiler

NAMED = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}


def of(compiler: LLCompiler, schema: object) -> Grammar:
    return compiler.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    "keyword",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": True},
        {"propertyNames": {}},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"dependencies": {}},
        {"if": {}},
        {"if": {"required": ["a"]}},
        {"then": False},
        {"else": {"required": ["b"]}},
        {"minContains": 1},
        {"maxContains": 2},
        {"contains": {}, "minItems": 1},
        {"format": "path"},
        {"x-guidance": {"whitespace_flexible": True, "unknown": 1}},
    ],
    ids=json.dumps,
)
def test_what_constrains_nothing_is_left_out(compiler: LLCompiler, keyword: dict[str, Any]) -> None:
    """`z.record` of zod writes the first of these. Inside of other schemas too."""
    for schema in (
        {**NAMED, **keyword},
        {"anyOf": [{**NAMED, **keyword}, {"type": "null"}]},
        {"$ref": "#/$defs/named", "$defs": {"named": {**NAMED, **keyword}}},
    ):
        assert follows(of(compiler, schema), '{"a": 1}')
        assert not follows(of(compiler, schema), '{"a": 2}')


@pytest.mark.parametrize(
    "keyword",
    [
        {"not": {}},
        {"propertyNames": {"pattern": "^b"}},
        {"unevaluatedProperties": False},
        {"dependentRequired": {"a": ["b"]}},
        {"if": {}, "then": False},
        {"minContains": 1, "contains": {"const": 1}},
        {"contains": {}, "minItems": "many"},
    ],
    ids=json.dumps,
)
def test_what_constrains_stays(compiler: LLCompiler, keyword: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be enforced"):
        of(compiler, {**NAMED, **keyword})


def test_names_that_are_spelled_like_keywords_are_names(compiler: LLCompiler) -> None:
    properties = {"if": {"const": 1}, "format": {"const": 2}, "minProperties": {"const": 9}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    assert follows(of(compiler, schema), '{"if": 1, "format": 2, "minProperties": 9}')
    assert follows(of(compiler, {"const": {"if": 1, "minProperties": 2}}), '{"if": 1, "minProperties": 2}')


BOOLEANS = {"type": "object", "patternProperties": {"^k[01]$": {"type": "boolean"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema", [{**BOOLEANS, "maxProperties": 2}, {"type": "object"}, {**BOOLEANS, "required": ["k0"]}]
)
def test_a_number_of_properties_that_repeated_names_would_meet_is_refused(
    compiler: LLCompiler, schema: dict[str, Any]
) -> None:
    """`{"k1": true, "k1": false}` has one property for every reader of JSON."""
    with pytest.raises(InvalidRequestError, match="minProperties 2 needs as many names in required"):
        of(compiler, {**schema, "minProperties": 2})
    with pytest.raises(InvalidRequestError, match="minProperties 2"):
        of(compiler, {"type": "array", "items": {**schema, "minProperties": 2}})


def test_a_number_of_properties_that_is_certain_is_enforced(compiler: LLCompiler) -> None:
    listed = {"a": {"const": 1}, "b": {"const": 2}}
    opened = {"type": "object", "properties": listed, "required": ["a", "b"], "minProperties": 2}
    assert follows(of(compiler, opened), '{"a": 1, "b": 2}')
    assert not follows(of(compiler, {"type": "object", "minProperties": 1}), "{}")


def test_alternatives_that_look_around_are_left_out_if_others_remain(compiler: LLCompiler) -> None:
    """As pydantic writes a Decimal."""
    text = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    assert follows(of(compiler, {"anyOf": [{"type": "number"}, text]}), "1.5")
    for schema in (text, {"anyOf": [text]}, {"oneOf": [{"type": "number"}, text]}):
        with pytest.raises(InvalidRequestError, match="cannot be enforced"):
            of(compiler, schema)
    assert follows(of(compiler, {"anyOf": [{"type": "string", "pattern": r"^\(\?=$"}]}), '"(?="')


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_known_formats_are_enforced(compiler: LLCompiler, name: str) -> None:
    assert not follows(of(compiler, {"type": "string", "format": name}), '"not one of these!"')
    assert not unknown_format({"items": {"format": name}})


def test_an_unknown_format_is_found_where_it_is_one() -> None:
    assert unknown_format({"anyOf": [{"type": "null"}, {"properties": {"a": {"format": "path"}}}]}) == "path"
    assert not unknown_format({"properties": {"format": {"const": "path"}}, "const": {"format": "path"}})
