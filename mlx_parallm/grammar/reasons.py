"""Why a grammar cannot be enforced, in terms of what the client sent. llguidance's own words name its internals."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlx_parallm.core import GrammarKind

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
