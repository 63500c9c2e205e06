"""Grammars of requests, tried in a child process first: each is refused in words, or every text it allows can be
followed. `kind`, and the source."""

import json

import numpy as np
from fuzz.mutation import after_first_line, bytes_mutated, json_with
from server.fakes import VOCAB, ByteTokenizer

from mlx_parallm.core.grammar import GrammarKind, GrammarSpec
from mlx_parallm.errors import GrammarError, InvalidRequestError
from mlx_parallm.grammar.compiler import LLCompiler

KINDS = ("json_schema", "regex", "choice", "grammar")
KEYWORDS = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "enum",
    "const",
    "anyOf",
    "allOf",
    "oneOf",
    "not",
    "$ref",
    "$defs",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "patternProperties",
    "dependentSchemas",
    "if",
    "then",
    "else",
    "contains",
    "definitions",
    "minProperties",
    "maxProperties",
]
WORDS = ("object", "array", "string", "integer", "number", "#", "#/$defs/a", "date-time", "^(a+)+$", "a{1000}{1000}")
of_schema = json_with(KEYWORDS, WORDS)
PIECES = (b"{1000}", b"(a|b)*", b"[^", b"\\p{L}", b"(?=", b"::= ", b"root ", b"start: ", b"%json {", b"/", b"|")
COMPILER = LLCompiler(ByteTokenizer(), VOCAB, cpu_limit_s=0.5)


def of_source(data, rng):
    return of_schema(data, rng) if data[:1] in b"{[" else bytes_mutated(data, rng, PIECES)


mutated = after_first_line(of_source, KINDS)


def are_texts(value):
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def run(data):
    kind, _, source = data.partition(b"\n")
    kind = kind.decode(errors="replace")
    try:
        text = source.decode()
        if kind == "choice" and not are_texts(json.loads(text)):
            return  # the schema of requests has checked it
        kind = GrammarKind(kind if kind in KINDS else "json_schema")
        state = COMPILER.compile(GrammarSpec(kind, text)).start()
    except (ValueError, RecursionError, InvalidRequestError):
        return
    words = np.zeros((VOCAB + 31) // 32, np.uint32)
    for step in range(40):
        state.fill(memoryview(words).cast("B").cast("I"))
        allowed = [token for token in range(VOCAB) if words[token // 32] >> (token % 32) & 1]
        assert allowed or state.ended
        if state.ended or state.free:
            return
        state.copy().forced()
        try:
            state.accept(allowed[step * 7919 % len(allowed)])
        except GrammarError:
            return
