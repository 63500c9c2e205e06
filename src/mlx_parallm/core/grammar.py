"""Texts that must follow a grammar: what a client may ask for, and what a row asks before each token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

COMPACT_JSON: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON on one line, spaced as models are used to: with free white space small models write
nothing else for long."""


class GrammarKind(StrEnum):
    """How a grammar is written.

    json_schema: JSON text. regex: Rust's syntax, of the whole text. choice: a JSON list of strings. grammar: GBNF
    (llama.cpp's), or Lark in llguidance's dialect. combination: several of these, of which each text follows one; see
    `combined`.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    COMBINATION = "combination"


class Thinks(StrEnum):
    """What comes before the text that a grammar is of.

    no: nothing. may: reasoning, where the text begins with the model's mark of it. already: reasoning, which the
    prompt has begun.
    """

    NO = "no"
    MAY = "may"
    ALREADY = "already"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as it was sent. `spelled`: special tokens that are text for it."""

    kind: GrammarKind
    source: str
    spelled: frozenset[int] = frozenset()
    thinks: Thinks = Thinks.NO


def combined(specs: Sequence[GrammarSpec]) -> GrammarSpec:
    """Texts that follow any one of `specs`, which agree in `spelled` and `thinks`."""
    source = json.dumps([{"kind": spec.kind, "source": spec.source} for spec in specs])
    return replace(specs[0], kind=GrammarKind.COMBINATION, source=source)


def parts_of(spec: GrammarSpec) -> tuple[GrammarSpec, ...]:
    """What was `combined`; a grammar of any other kind is its only part."""
    if spec.kind is not GrammarKind.COMBINATION:
        return (spec,)
    parts = json.loads(spec.source)
    return tuple(replace(spec, kind=GrammarKind(part["kind"]), source=part["source"]) for part in parts)


class GrammarState(Protocol):
    """How far one text has come. One thread at a time."""

    def fill(self, mask: memoryview) -> None:
        """Writes which tokens may come next, a bit each: token t is bit t % 32 of the 32-bit word t // 32.

        An end token is allowed where the text may end. Never raises: what goes wrong is told by `accept`.

        Args:
            mask: writable and contiguous; its words hold the vocabulary.
        """
        ...

    def accept(self, token: int) -> None:
        """Takes the token that was drawn. Raises GrammarError: it is not allowed there, or a limit was reached."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        ...


class Grammar(Protocol):
    """A compiled grammar, which any number of texts may follow. Any thread."""

    def start(self) -> GrammarState:
        """Of a text that is empty as yet."""
        ...


class GrammarCompiler(Protocol):
    """Any thread; takes a while, and no longer than its limits allow."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidRequestError: it is malformed, asks for what cannot be enforced, or is too complex."""
        ...

    def close(self) -> None:
        """No grammar is compiled any more; what is being compiled ends first."""
        ...
