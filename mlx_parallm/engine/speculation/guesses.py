"""Where the guesses of one row come from, and how often each source was right lately.

PromptLookup guesses the next tokens of a sequence from its own text: what followed the last tokens earlier. It costs no
forward pass, and guesses well where an answer repeats its prompt: in edits, summaries, quotes and code. Saxena, "Prompt
Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np

from mlx_parallm.core import GrammarState
from mlx_parallm.engine.speculation.choosing import LONGEST_DRAFT
from mlx_parallm.errors import GrammarError


class PromptLookup:
    """Finds the newest earlier occurrence of the last three tokens, or else of the last two.

    It compares the whole text with its end, in about 10 microseconds for each 10,000 tokens.

    Args:
        tokens: the sequence's own list, which grows at its end.
    """

    __slots__ = ("_searched", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._searched = array("i", tokens)  # the same tokens, for NumPy

    def guess(self, most: int) -> Sequence[int]:
        """Up to `most` tokens that may come next; none if the last two tokens are new."""
        self._searched.extend(self._tokens[len(self._searched) :])
        place = _after_newest(np.frombuffer(self._searched, np.intc))
        return () if place is None else self._from(place, most)

    def _from(self, place: int, most: int) -> Sequence[int]:
        """The tokens from `place` on. Beyond the end of the text they repeat what is guessed already."""
        guess = list(self._tokens[place : place + most])
        while len(guess) < most:
            guess += guess[: most - len(guess)]
        return guess


def _after_newest(tokens: np.ndarray[tuple[int], np.dtype[np.intc]]) -> int | None:
    """The position after the newest earlier occurrence of the last three tokens, or else of the last two."""
    if len(tokens) < 3:
        return None
    ends = np.flatnonzero(tokens[1:-1] == tokens[-1]) + 1
    ends = ends[tokens[ends - 1] == tokens[-2]]
    if not len(ends):
        return None
    of_three = ends[(ends > 1) & (tokens[ends - 2] == tokens[-3])]
    return int((of_three if len(of_three) else ends)[-1]) + 1


_NEWEST, _NEWEST_OF_ALL = 0.2, 0.02
"""Weights of the newest guess in the share of right ones: of one row, and of all rows."""

_UNUSED, _UNUSED_OF_ALL = 1 / 128, 1 / 4096
"""How far the shares of the draft model return to what is expected with each guess that is not asked of it. So it is
tried again in the end, because only a guess that was drawn can show whether it is right."""


class Source(Enum):
    """What a guess is made from: the tokens that a grammar demands, what followed earlier in the row's own text, or a
    draft model."""

    GRAMMAR = "grammar"
    TEXT = "text"
    MODEL = "model"


_FIRST = {Source.GRAMMAR: 0.7, Source.TEXT: 0.3, Source.MODEL: 0.6}
"""Expected shares of right guesses before the first one."""


class Acceptance:
    """The share of right guesses of each source lately, over all rows. New rows begin with it."""

    __slots__ = ("shares",)

    def __init__(self) -> None:
        self.shares = dict(_FIRST)

    def add(self, source: Source, right: bool) -> None:
        """Remembers whether a guessed token was right."""
        self.shares[source] += _NEWEST_OF_ALL * (right - self.shares[source])

    def add_unused(self, source: Source) -> None:
        """Remembers that the source was not asked for a guess."""
        self.shares[source] += _UNUSED_OF_ALL * (_FIRST[source] - self.shares[source])


class RowGuesses:
    """Guesses the next tokens of one row.

    A guess that is not computed is compared as well, with the token that is drawn anyway. So the share of right ones is
    known before a draft costs anything. Only a draft model has to be asked.

    Attributes:
        source: of the last guess.

    Args:
        tokens: the row's own list, which grows at its end.
        sources: those that are used.
        of_all: the shares of all rows.
    """

    __slots__ = ("_lookup", "_of_all", "_shares", "source")

    def __init__(self, tokens: Sequence[int], sources: frozenset[Source], of_all: Acceptance) -> None:
        self.source = Source.TEXT
        self._lookup = PromptLookup(tokens) if Source.TEXT in sources else None
        self._of_all = of_all
        self._shares = dict(of_all.shares)

    @property
    def acceptance(self) -> float:
        """The share of right guesses of the source of the last guess."""
        return self._shares[self.source]

    @property
    def model_acceptance(self) -> float:
        """The share of right guesses of the draft model."""
        return self._shares[Source.MODEL]

    def guess(self, grammar: GrammarState | None) -> Sequence[int]:
        """The tokens that may come next, all of which the grammar allows; none if there is no guess."""
        self._add_unused_model()
        forced = () if grammar is None else grammar.forced()[:LONGEST_DRAFT]
        self.source = Source.GRAMMAR if forced else Source.TEXT
        guess = forced or (() if self._lookup is None else self._lookup.guess(LONGEST_DRAFT))
        return guess if grammar is None else _allowed(grammar.copy(), guess)

    def take_from_model(self, drawn: Sequence[int], grammar: GrammarState | None) -> Sequence[int]:
        """The guess that the draft model has drawn, as far as the grammar allows it."""
        self.source = Source.MODEL
        guess = drawn if grammar is None else _allowed(grammar.copy(), drawn)
        if not guess:
            self.add(False)  # its first token is one that cannot be drawn
        return guess

    def add(self, right: bool) -> None:
        """Remembers whether a token of the last guess was right."""
        self._shares[self.source] += _NEWEST * (right - self._shares[self.source])
        self._of_all.add(self.source, right)

    def _add_unused_model(self) -> None:
        if self.source is not Source.MODEL:
            shares, of_all = self._shares, self._of_all.shares
            shares[Source.MODEL] += _UNUSED * (of_all[Source.MODEL] - shares[Source.MODEL])
            self._of_all.add_unused(Source.MODEL)


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
