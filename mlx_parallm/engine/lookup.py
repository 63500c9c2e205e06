"""PromptLookup guesses the next tokens of a sequence from its own text: what followed the last tokens earlier.

It costs no forward pass, and guesses well where an answer repeats its prompt: in edits, summaries, quotes and code.
Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

_LENGTHS = (3, 2)
"""Lengths of the endings that are looked up, in tokens; the longest one that occurred before decides."""

_MOST_INDEXED = 4096
"""Tokens that one call adds to the index, so that a long prompt does not make the others wait."""


class PromptLookup:
    """Finds the newest earlier occurrence of the last tokens.

    Args:
        tokens: the sequence's own list, which grows at its end.
    """

    __slots__ = ("_indexed", "_places", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._places: dict[tuple[int, ...], int] = {}  # endings, and where what follows them begins
        self._indexed = 0  # every ending before this position is in `_places`

    def guess(self, most: int) -> Sequence[int]:
        """Up to `most` tokens that may come next; none if the last tokens are new, or while the index is being made."""
        tokens = self._tokens
        stop = min(len(tokens), self._indexed + _MOST_INDEXED)
        for end in range(self._indexed + 1, stop):  # the ending of the whole text is looked up, not indexed
            for length in _LENGTHS:
                if end >= length:
                    self._places[tuple(tokens[end - length : end])] = end
        self._indexed = max(self._indexed, stop - 1)
        if stop < len(tokens):
            return ()
        for length in _LENGTHS:
            place = self._places.get(tuple(tokens[-length:]))
            if place is not None:
                return self._from(place, most)
        return ()

    def _from(self, place: int, most: int) -> Sequence[int]:
        """The tokens from `place` on. Beyond the end of the text they repeat what is guessed already."""
        guess = list(self._tokens[place : place + most])
        while len(guess) < most:
            guess += guess[: most - len(guess)]
        return guess
