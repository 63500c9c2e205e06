"""Compiles a grammar to an llguidance matcher, and wraps the matcher as `core.Grammar` and `core.GrammarState`.

    GrammarSpec → definition (llguidance's Lark, or JSON with a list of grammars) → LLMatcher → LLGrammar → LLState

Why a grammar cannot be enforced is said in terms of what the client sent, because llguidance's own words name its
internals.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from mlx_parallm.core.grammar import COMPACT_JSON, GrammarKind, GrammarSpec, parts_of
from mlx_parallm.core.schemas import enforceable_schema
from mlx_parallm.errors import GrammarError

MAX_CHARACTERS = 300
TOO_COMPLEX = "it is too complex, or it requires a text without an end"

_SOURCE_LINES = r"(?m)^ +(?:\d+ \|.*|\^+)$"
"""Lines of a Lark grammar, which the client may not have written, and the mark under one of them."""

_IN_LARK = r"^at \d+\(\d+\): |failed to compile JSON schema: "
"""Where something is in a Lark grammar. Only a client that sent one knows the place."""

_IN_OTHER_WORDS: Sequence[tuple[str, str]] = (
    (r'invalid regex ".*" \(in regex\): ', ""),
    (r"regex parse error:\n +(.*)\n(?: .*\n)*error: (.*)", r"\2, in /\1/"),
    (_SOURCE_LINES, ""),
    (r"\s*<non-verbose/>", ""),
    (r"NoExtensionBias", "nothing satisfies it, because it refers to itself without an end"),
    (r"parser error: Too many items.*", TOO_COMPLEX),
    (r"initial lexer configuration \(grammar\) too big.*", "its regular expressions and constants are too long in all"),
    (r"anyOf is empty", "an enum or anyOf is empty"),
    (r"Pointer '(.*)' does not exist", r"$ref '#\1' is not part of the schema"),
    (r"Unsatisfiable schema", "nothing satisfies it"),
    (r"Expecting object schema to apply options", "nothing satisfies it: false allows no value"),
    (r"Unimplemented keys: \[(.*)\]", r"not supported: \1"),
    (r"Enable 'coerce_one_of'.*", "anyOf is."),
    (r"Resource '(.*)' is not present in a registry.*", r"$ref '\1' is not part of the schema"),
    (r"lookarounds not supported yet; \w+ in", "anchors and word boundaries are not supported inside"),
    (r"Failed to convert the grammar from GBNF to Lark", "as GBNF"),
    (r"; following special tokens are available: .*", ""),
)


def in_other_words(reason: str, kind: GrammarKind) -> str:
    """llguidance's `reason` to refuse a grammar of this kind, on one line."""
    for pattern, words in _IN_OTHER_WORDS:
        reason = re.sub(pattern, words, reason)
    if kind is not GrammarKind.GRAMMAR:
        reason = re.sub(_IN_LARK, "", reason)
    return " ".join(reason.split())[:MAX_CHARACTERS]


_limits = partial(LLParserLimits, max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False)
_LIMITS, _LIMITS_OF_PATTERNS = _limits(), _limits(initial_lexer_fuel=25_000)
"""The limits of any grammar, and of one with regular expressions. llguidance's other limits keep their defaults, which
allow about 15 ms of work for a token. They miss one kind of work: a regular expression of `n` optional parts, such as
`a?a?a?`, takes `n` * `n` steps for a single token. A limit on the size of the lexer bounds `n`, to some 0.15 s. An
object with 1,000 properties, or 1,800 constants of 30 characters, would keep to it too."""
_WITH_PATTERNS = frozenset({GrammarKind.REGEX, GrammarKind.GRAMMAR})
_PATTERN = '"pattern'
"""The beginning of `"pattern"` and `"patternProperties"`, which bring regular expressions into a JSON schema."""

_COMPACT_JSON: Any = dict(COMPACT_JSON)
_ALL_BITS = 0xFF

_log = logging.getLogger(__name__)


class GrammarRefused(Exception):  # noqa: N818 - the grammar is at fault, not the program
    """A grammar cannot be compiled; the message is the reason."""


def build_matcher(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    """A matcher at the beginning of a text, with its first mask computed.

    There is no bound on the time and memory it takes: check the grammar with `Trial` first.

    Raises:
        GrammarRefused: the grammar is malformed or too large, or it begins with a text that has no end.
    """
    try:
        definition = _definition(spec)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(in_other_words(str(error), spec.kind)) from None
    patterns = _PATTERN in definition or any(part.kind in _WITH_PATTERNS for part in parts_of(spec))
    limits = _LIMITS_OF_PATTERNS if patterns else _LIMITS
    matcher = LLMatcher(tokenizer, definition, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    first = matcher.deep_copy()
    if not matcher.is_error() and (forced := first.compute_ff_tokens()):
        first.consume_token(forced[0])
    if first.is_error():
        raise GrammarRefused(in_other_words(first.get_error(), spec.kind))
    return matcher


class LLGrammar:
    """Implements `core.Grammar`.

    Args:
        matcher: at the beginning of a text. It is copied for each text and never advanced itself.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> LLState:
        return LLState(self._matcher.deep_copy())


class LLState:
    """Implements `core.GrammarState`. llguidance releases the interpreter lock while it computes a mask."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, mask: memoryview) -> None:
        """See `core.GrammarState.fill`. After a failure of the matcher all tokens are allowed; `accept` raises then."""
        words = (ctypes.c_char * mask.nbytes).from_buffer(mask)
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(words), mask.nbytes)
        if self._matcher.is_error():
            ctypes.memset(words, _ALL_BITS, mask.nbytes)

    def accept(self, token: int) -> None:
        """See `core.GrammarState.accept`."""
        if not self._matcher.consume_token(token):
            _log.info("a grammar failed at token %d: %s", token, self._matcher.get_error())
            raise GrammarError(f"the grammar cannot be followed after this text: {TOO_COMPLEX}")

    def copy(self) -> LLState:
        return LLState(self._matcher.deep_copy())

    def forced(self) -> Sequence[int]:
        return list(self._matcher.compute_ff_tokens())

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def free(self) -> bool:
        return False


def _definition(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own form. Raises ValueError: it is malformed."""
    if spec.kind is not GrammarKind.COMBINATION and not spec.opening:
        return _DEFINITIONS[spec.kind](spec.source)
    parts = parts_of(spec)
    grammars = [{**_grammar(part), "name": f"part_{index}"} for index, part in enumerate(parts)]
    openings = [f"{json.dumps(part.opening)} " if part.opening else "" for part in parts]
    start = "start: " + " | ".join(f"{opening}@part_{index}" for index, opening in enumerate(openings))
    return json.dumps({"grammars": [{"lark_grammar": start}, *grammars]})


def _grammar(part: GrammarSpec) -> dict[str, Any]:
    definition = _DEFINITIONS[part.kind](part.source)
    if part.kind in (GrammarKind.CHOICE, GrammarKind.GRAMMAR, GrammarKind.CALLS):
        return {"lark_grammar": definition}
    [grammar] = json.loads(definition)["grammars"]
    return dict(grammar)


def _json_schema(source: str) -> str:
    bounded = json.dumps(enforceable_schema(json.loads(source)))
    return LLMatcher.grammar_from_json_schema(bounded, overrides=_COMPACT_JSON)


def _choice(source: str) -> str:
    alternatives = " | ".join(json.dumps(choice) for choice in json.loads(source))
    return LLMatcher.grammar_from_lark(f"start: {alternatives}")


_DEFINITIONS: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.CHOICE: _choice,
    GrammarKind.GRAMMAR: lambda source: grammar_from("grammar", source),
    GrammarKind.CALLS: LLMatcher.grammar_from_lark,
}
