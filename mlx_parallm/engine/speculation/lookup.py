"""PromptLookup guesses the next tokens of a sequence from its own text: what followed the last tokens earlier.

It costs no forward pass, and guesses well where an answer repeats its prompt: in edits, summaries, quotes and code.
Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np


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
