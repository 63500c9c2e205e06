"""Where the guesses of one row come from, and how often each source was right lately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from mlx_parallm.core import GrammarState
from mlx_parallm.engine.lookup import PromptLookup
from mlx_parallm.errors import GrammarError

LONGEST = 7
"""Tokens of a guess at most. With the token before them they are 8, the most that the attention of Metal takes in one
call without another kernel."""

_NEWEST = 0.2
"""Weight of the newest guess in the share of right ones."""


class Source(Enum):
    """What a guess is made from: the tokens that a grammar demands, or what followed earlier in the row's own text."""

    GRAMMAR = "grammar"
    TEXT = "text"


_FIRST = {Source.GRAMMAR: 0.7, Source.TEXT: 0.3}
"""Expected shares of right guesses before the first one."""


class RowGuesses:
    """Guesses the next tokens of one row.

    A guess that is not computed is compared as well, with the token that is drawn anyway. So the share of right ones is
    known before a draft costs anything.
    """

    __slots__ = ("_lookup", "_shares", "_source")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._lookup = PromptLookup(tokens)
        self._shares = dict(_FIRST)
        self._source = Source.TEXT

    @property
    def acceptance(self) -> float:
        """The share of right guesses of the source of the last guess."""
        return self._shares[self._source]

    def guess(self, grammar: GrammarState | None) -> Sequence[int]:
        """The tokens that may come next, all of which the grammar allows; none if there is no guess."""
        forced = () if grammar is None else grammar.forced()[:LONGEST]
        self._source = Source.GRAMMAR if forced else Source.TEXT
        guess = forced or self._lookup.guess(LONGEST)
        return guess if grammar is None else _allowed(grammar.copy(), guess)

    def add(self, right: bool) -> None:
        """Remembers whether a token of the last guess was right."""
        self._shares[self._source] += _NEWEST * (right - self._shares[self._source])


def _allowed(state: GrammarState, guess: Iterable[int]) -> list[int]:
    """The beginning of a guess that the grammar allows. `state` advances along it."""
    allowed = list[int]()
    for token in guess:
        try:
            state.accept(token)
        except GrammarError:
            return allowed
        allowed.append(token)
    return allowed
