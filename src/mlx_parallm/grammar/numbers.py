"""JSON whose numbers end: small models go on with digits for as long as a schema lets them, which is for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_parallm.core import Grammar, GrammarState

DIGITS = 20
"""In a row, about so many: the longest 64-bit integer has 20, and 17 tell every double from the next."""

Words = npt.NDArray[np.uint32]

_QUOTE, _ESCAPE, _MARKUP = ord('"'), ord("\\"), ord("<")
_DIGITS = frozenset(b"0123456789")


@dataclass(frozen=True, slots=True)
class NumberTokens:
    """The bytes of each token, and the mask of those that begin with no digit."""

    spelt: Sequence[bytes]
    others: Words

    @staticmethod
    def of(spelt: Sequence[bytes]) -> NumberTokens:
        bits = np.array([not (token and token[0] in _DIGITS) for token in spelt], np.bool_)
        packed = np.packbits(bits, bitorder="little")
        return NumberTokens(spelt, np.pad(packed, (0, -len(packed) % 4)).view("<u4"))


@dataclass(frozen=True, slots=True)
class EndingNumbers:
    """Implements `core.Grammar`: the JSON of another one, without digits where a number has had its share of them.
    Where that allows nothing but a digit, as in a long constant, a digit comes. A text that begins with `<` is no JSON,
    but a call instead of it, and stays as it is."""

    grammar: Grammar
    tokens: NumberTokens

    def start(self) -> GrammarState:
        return _State(self.grammar.start(), self.tokens)


class _State:
    """Implements `core.GrammarState`. _run: digits since anything else; None: they are not counted."""

    def __init__(self, inner: GrammarState, tokens: NumberTokens) -> None:
        self._inner = inner
        self._tokens = tokens
        self._run: int | None = 0
        self._begun = False
        self._in_string = False
        self._escaped = False

    def fill(self, mask: memoryview) -> None:
        """See `core.GrammarState.fill`."""
        self._inner.fill(mask)
        if self._run is None or self._run < DIGITS:
            return
        words = np.frombuffer(mask, "<u4")
        ending = words & self._tokens.others
        if ending.any():
            words[:] = ending

    def accept(self, token: int) -> None:
        """See `core.GrammarState.accept`."""
        self._inner.accept(token)
        for byte in self._tokens.spelt[token]:
            self._see(byte)

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def _see(self, byte: int) -> None:
        if not self._begun:
            self._begun, self._run = True, None if byte == _MARKUP else 0
        if self._run is None:
            return
        if self._in_string:
            self._in_string = byte != _QUOTE or self._escaped
            self._escaped = byte == _ESCAPE and not self._escaped
        else:
            self._in_string = byte == _QUOTE
            self._run = self._run + 1 if byte in _DIGITS else 0
