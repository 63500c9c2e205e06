"""Numbers of JSON end; whatever else a schema allows stays allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammar.test_schemas import of as of_schema
from server.fakes import EOS
from walks import allowed, follows

from mlx_parallm.core.grammar import Grammar, GrammarKind, GrammarSpec
from mlx_parallm.core.schemas import LEAST
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.grammar.wrappers import MAX_DIGITS

NUMBERS = set(b"0123456789")


def after(grammar: Grammar, text: str) -> set[int]:
    """What may follow `text`."""
    state = grammar.start()
    for token in text.encode():
        assert token in allowed(state)
        state.accept(token)
    return allowed(state)


@pytest.mark.parametrize("before", ["", "-", "0.", "1.5e"])
def test_after_so_many_digits_a_number_goes_on_otherwise_or_ends(compiler: LLCompiler, before: str) -> None:
    grammar = of_schema(compiler, {"type": "number"})
    digits = "1" * (MAX_DIGITS - 1)
    assert after(grammar, before + digits) > NUMBERS
    assert not NUMBERS & after(grammar, before + digits + "1")
    assert EOS in after(grammar, before + digits + "1")
    assert after(grammar, digits + "1") == {EOS, *b".eE"}


def test_64_bits_and_doubles_fit(compiler: LLCompiler) -> None:
    grammar = of_schema(compiler, {"type": "array", "items": {"type": "number"}})
    assert follows(grammar, f"[{-(2**63)}, {2**64 - 1}, {1 / 3!r}, {2.0**-1074!r}]")


def test_digits_of_strings_are_not_counted(compiler: LLCompiler) -> None:
    grammar = of_schema(compiler, {"type": "array", "items": {"type": "string"}})
    assert follows(grammar, json.dumps(['0\\"' + "1" * 100, "2" * 100]))


def test_a_copy_advances_alone_and_text_that_must_follow_is_known(compiler: LLCompiler) -> None:
    state = of_schema(compiler, {"const": {"temperature": 20}}).start()
    state.accept(ord("{"))
    copied = state.copy()
    for token in b'"temp':
        copied.accept(token)
    assert bytes(copied.forced()) == b'erature": 20}'
    assert bytes(state.forced()) == b'"temperature": 20}'


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        INTEGER,
        {"type": ["null", "integer"]},
        {"anyOf": [INTEGER, {"type": "boolean"}]},
        {"$ref": "#/$defs/type", "$defs": {"type": INTEGER}},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
        {"type": "integer", "exclusiveMinimum": -(2**70)},
        {"allOf": [INTEGER, {"maximum": 2**64}]},
    ],
    ids=str,
)
def test_an_integer_stays_within_64_bits(compiler: LLCompiler, schema: dict[str, Any]) -> None:
    grammar = of_schema(compiler, schema)
    assert all(follows(grammar, str(value)) for value in (0, -7, 10**18, 2**63 - 1, LEAST))
    beyond = (2**63, 2**63 + 1, -(2**63) - 1, 10**19, -(10**19), int("9" * 25))
    assert not any(follows(grammar, str(value)) for value in beyond)


def test_integers_lie_anywhere_in_a_schema(compiler: LLCompiler) -> None:
    properties = {"enum": INTEGER, "items": {"type": "array", "items": INTEGER}}
    grammar = of_schema(compiler, {"type": "object", "properties": properties, "additionalProperties": INTEGER})
    assert follows(grammar, json.dumps({"enum": 2**63 - 1, "items": [1], "x": 5}))
    for wrong in ({"enum": 2**63}, {"items": [2**63]}, {"x": 2**63}):
        assert not follows(grammar, json.dumps(wrong))


def test_narrower_bounds_and_constants_are_the_schemas_own(compiler: LLCompiler) -> None:
    small = of_schema(compiler, {"type": "integer", "minimum": 0, "exclusiveMaximum": 10})
    assert [follows(small, text) for text in ("-1", "0", "9", "10")] == [False, True, True, False]
    assert follows(of_schema(compiler, {"type": "integer", "maximum": 5}), str(LEAST))
    assert follows(of_schema(compiler, {"enum": [10**30]}), str(10**30))
    assert follows(of_schema(compiler, {"type": ["integer", "number"]}), str(2**64))
    assert follows(of_schema(compiler, {"type": "integer", "multipleOf": 12345}), "12345")


def test_only_json_is_shortened(compiler: LLCompiler) -> None:
    assert follows(compiler.compile(GrammarSpec(GrammarKind.REGEX, "[0-9]+")), "1" * 100)
