"""Grammars that a text must follow: their notation, and the protocols that enforce them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

COMPACT_JSON: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON on one line with the usual spaces. If a grammar allows any white space, small models
write little else."""


class GrammarKind(StrEnum):
    """The notation of a grammar's source."""

    JSON_SCHEMA = "json_schema"
    """JSON text that is valid against a JSON schema."""
    REGEX = "regex"
    """A regular expression in Rust's syntax that matches the whole text."""
    CHOICE = "choice"
    """A JSON list of strings."""
    GRAMMAR = "grammar"
    """GBNF (llama.cpp's notation), or Lark in llguidance's dialect."""
    CALLS = "tool_call"
    """Lark that the server made of the tools; see `ToolFormat.grammar`."""
    TEXT = "text"
    """Any text. The source is empty; only what comes before the text is bounded."""
    COMBINATION = "combination"
    """Several grammars; a text follows one of them. See `combined`."""


class ReasoningPrefix(StrEnum):
    """What may come before the text that a grammar describes."""

    NONE = "none"
    """Nothing."""
    OPTIONAL = "optional"
    """Reasoning, if the text begins with the model's start mark."""
    OPEN = "open"
    """The rest of reasoning that the prompt has begun."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as the client sent it.

    `visible_specials`: ids of special tokens that are text for this grammar. `opening`: a fixed text that comes before
    the text that follows it. `reasoning_budget`: the most tokens of reasoning before both; None: any number.
    """

    kind: GrammarKind
    source: str
    visible_specials: frozenset[int] = frozenset()
    reasoning_prefix: ReasoningPrefix = ReasoningPrefix.NONE
    opening: str = ""
    reasoning_budget: int | None = None


def combined(specs: Sequence[GrammarSpec]) -> GrammarSpec:
    """The grammar of texts that follow any one of `specs`, which differ in `kind`, `source` and `opening` only."""
    source = json.dumps([{"kind": spec.kind, "source": spec.source, "opening": spec.opening} for spec in specs])
    return replace(specs[0], kind=GrammarKind.COMBINATION, source=source, opening="")


def parts_of(spec: GrammarSpec) -> tuple[GrammarSpec, ...]:
    """The specs of a combination; for any other kind, the spec itself."""
    if spec.kind is not GrammarKind.COMBINATION:
        return (spec,)
    parts = json.loads(spec.source)
    return tuple(replace(spec, **{**part, "kind": GrammarKind(part["kind"])}) for part in parts)


class GrammarState(Protocol):
    """One text's position in a grammar. Used by one thread at a time."""

    def fill(self, mask: memoryview) -> None:
        """Writes the tokens that may come next as bits: token t is bit t % 32 of the 32-bit word t // 32.

        An end token is allowed where the text may end. Never raises; `accept` reports errors.

        Args:
            mask: writable and contiguous, with enough words for the vocabulary.
        """

    def accept(self, token: int) -> None:
        """Advances by the token that was sampled.

        Raises:
            GrammarError: the token is not allowed here, or a limit was reached.
        """

    def copy(self) -> GrammarState:
        """A state at the same position, which advances by itself."""

    def forced(self) -> Sequence[int]:
        """The next tokens where only one text may follow. Other tokens may stand for the same text, so they are a
        guess."""

    @property
    def ended(self) -> bool:
        """Whether no token can follow."""

    @property
    def free(self) -> bool:
        """Whether any text may follow, so that the state is not needed any more."""


class Grammar(Protocol):
    """A compiled grammar, which any number of texts may follow. Safe to use from any thread."""

    def start(self) -> GrammarState:
        """The state of an empty text."""


@dataclass(frozen=True, slots=True)
class SpecifiedGrammar:
    """A compiled grammar with the spec that it was compiled from, so that another node can compile it too."""

    spec: GrammarSpec
    compiled: Grammar

    def start(self) -> GrammarState:
        """See `Grammar.start`."""
        return self.compiled.start()


class NewGrammarError(Exception):
    """The grammar was not compiled lately."""


class GrammarCompiler(Protocol):
    """Compiles grammars within limits of time and size. Safe to use from any thread."""

    def compile(self, spec: GrammarSpec, new: bool = True) -> Grammar:
        """Compiles a grammar; this may take seconds if it is new.

        Raises:
            InvalidRequestError: the grammar is malformed or too complex, or it cannot be enforced.
            NewGrammarError: it would have to be compiled, and `new` is false.
        """

    def close(self) -> None:
        """Refuses further compilations, and waits for the current ones."""


@dataclass(frozen=True, slots=True)
class KnownGrammars:
    """A compiler that compiles nothing new."""

    compiler: GrammarCompiler

    def compile(self, spec: GrammarSpec, new: bool = False) -> Grammar:
        """See `GrammarCompiler.compile`."""
        return self.compiler.compile(spec, new=False)

    def close(self) -> None:
        """See `GrammarCompiler.close`."""
        self.compiler.close()
