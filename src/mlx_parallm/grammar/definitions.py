"""Grammars as clients write them, in llguidance's own form, and the limits of following them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from mlx_parallm.core import COMPACT_JSON, GrammarKind, GrammarSpec, parts_of, with_bounded_integers

LIMITS = LLParserLimits(max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False)
"""Others at llguidance's defaults: about 15 ms of work for a token, at the most."""

_COMPACT: Any = dict(COMPACT_JSON)

_MOST_CHARACTERS_TOLD = 300


class RefusedGrammar(Exception):  # noqa: N818 - it is the grammar that is at fault
    """Why a grammar cannot be followed, for people."""


def matcher(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    """At the beginning of a text, its first mask computed. May take for ever: see `Trial`. Raises RefusedGrammar."""
    try:
        definition = _definition(spec)
    except ValueError as error:
        raise _refused(str(error)) from None
    made = LLMatcher(tokenizer, definition, log_level=0, limits=LIMITS)
    if not made.is_error():
        made.compute_bitmask()
    if made.is_error():
        raise _refused(made.get_error())
    return made


def _definition(spec: GrammarSpec) -> str:
    """In llguidance's own form: Lark, or JSON with a list of grammars. Raises ValueError."""
    if spec.kind is not GrammarKind.COMBINATION:
        return _DEFINITIONS[spec.kind](spec.source)
    parts = [{**_grammar(part), "name": f"part_{at}"} for at, part in enumerate(parts_of(spec))]
    start = "start: " + " | ".join(f"@{part['name']}" for part in parts)
    return json.dumps({"grammars": [{"lark_grammar": start}, *parts]})


def _grammar(part: GrammarSpec) -> dict[str, Any]:
    definition = _definition(part)
    if part.kind in (GrammarKind.CHOICE, GrammarKind.GRAMMAR):
        return {"lark_grammar": definition}
    [grammar] = json.loads(definition)["grammars"]
    return dict(grammar)


def _refused(reason: str) -> RefusedGrammar:
    return RefusedGrammar(" ".join(reason.split())[:_MOST_CHARACTERS_TOLD])


_DEFINITIONS: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: lambda text: LLMatcher.grammar_from_json_schema(_bounded(text), overrides=_COMPACT),
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.CHOICE: lambda text: LLMatcher.grammar_from_lark(_alternatives(json.loads(text))),
    GrammarKind.GRAMMAR: lambda text: grammar_from("grammar", text),
}


def _bounded(schema: str) -> str:
    return json.dumps(with_bounded_integers(json.loads(schema)))


def _alternatives(choices: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)
