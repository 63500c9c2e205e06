"""Grammars that wrap another one: JSON with numbers of bounded length, and reasoning before the constrained text."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_parallm.core import Grammar, GrammarState, TextTokenizer

MAX_DIGITS = 20
"""Digits in a row that a number may have: the longest 64-bit integer has 20, and 17 distinguish any two doubles."""

_ALL_BITS = 0xFF
_QUOTE, _ESCAPE, _MARKUP = ord('"'), ord("\\"), ord("<")
_DIGITS = frozenset(b"0123456789")


# -- numbers of bounded length -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DigitTokens:
    """The bytes of each token, and the packed mask (32-bit words) of the tokens that do not begin with a digit."""

    token_bytes: Sequence[bytes]
    non_digits: npt.NDArray[np.uint32]

    @staticmethod
    def of(token_bytes: Sequence[bytes]) -> DigitTokens:
        bits = np.array([not (token and token[0] in _DIGITS) for token in token_bytes], np.bool_)
        packed = np.packbits(bits, bitorder="little")
        return DigitTokens(token_bytes, np.pad(packed, (0, -len(packed) % 4)).view("<u4"))


@dataclass(frozen=True, slots=True)
class BoundedNumbers:
    """Implements `core.Grammar`: the JSON of `grammar`, in which a number ends after about MAX_DIGITS digits.

    Small models repeat digits for as long as a schema allows it, which may be forever. Where `grammar` allows nothing
    but a digit, as in a long constant, digits stay allowed. A text that begins with `<` is a tool call instead of JSON;
    its digits are not counted.
    """

    grammar: Grammar
    tokens: DigitTokens

    def start(self) -> GrammarState:
        return _BoundedNumbersState(self.grammar.start(), self.tokens)


class _BoundedNumbersState:
    """Implements `core.GrammarState`. `_digits` counts the digits in a row; None: digits are not counted."""

    def __init__(self, inner: GrammarState, tokens: DigitTokens) -> None:
        self._inner = inner
        self._tokens = tokens
        self._digits: int | None = 0
        self._started = False
        self._in_string = False
        self._escaped = False

    def fill(self, mask: memoryview) -> None:
        """See `core.GrammarState.fill`."""
        self._inner.fill(mask)
        if self._digits is None or self._digits < MAX_DIGITS:
            return
        words = np.frombuffer(mask, "<u4")
        without_digits = words & self._tokens.non_digits
        if without_digits.any():
            words[:] = without_digits

    def accept(self, token: int) -> None:
        """See `core.GrammarState.accept`."""
        self._inner.accept(token)
        for byte in self._tokens.token_bytes[token]:
            self._read(byte)

    def copy(self) -> GrammarState:
        following = copy(self)
        following._inner = self._inner.copy()
        return following

    def forced(self) -> Sequence[int]:
        return self._inner.forced()

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def _read(self, byte: int) -> None:
        if not self._started:
            self._started, self._digits = True, None if byte == _MARKUP else 0
        if self._digits is None:
            return
        if self._in_string:
            self._in_string = byte != _QUOTE or self._escaped
            self._escaped = byte == _ESCAPE and not self._escaped
        else:
            self._in_string = byte == _QUOTE
            self._digits = self._digits + 1 if byte in _DIGITS else 0


# -- reasoning first -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AfterReasoning:
    """Implements `core.Grammar`: free reasoning, its end mark, and then a text of `grammar`.

    Args:
        tokenizer: of a model that marks its reasoning.
        started: whether the prompt ends inside the reasoning. Otherwise a text either begins with the start mark, or
            follows `grammar` from its first token.
    """

    grammar: Grammar
    tokenizer: TextTokenizer
    started: bool

    def start(self) -> GrammarState:
        return _AfterReasoningState(self.grammar.start(), self.tokenizer, self.started)


class _AfterReasoningState:
    """Implements `core.GrammarState`.

    _start_mark: tokens of the start mark that are still to come; empty once the reasoning or the text has begun
    _tail:       the last bytes of the reasoning, enough to recognise an end mark that is split over tokens
    """

    def __init__(self, inner: GrammarState, tokenizer: TextTokenizer, started: bool) -> None:
        assert tokenizer.reasoning is not None
        self._inner = inner
        self._tokenizer = tokenizer
        self._end_mark = tokenizer.reasoning.end.encode()
        self._start_mark = [] if started else tokenizer.encode(tokenizer.reasoning.start, add_special_tokens=False)
        self._reasoning = started
        self._tail = b""

    def fill(self, mask: memoryview) -> None:
        """See `core.GrammarState.fill`."""
        bits = mask.cast("B")
        if self._reasoning and not self._start_mark:
            bits[:] = bytes([_ALL_BITS]) * len(bits)
            for token in self._tokenizer.eos_token_ids:
                bits[token // 8] &= ~(1 << token % 8) & _ALL_BITS
            return
        if self._reasoning:
            bits[:] = bytes(len(bits))
        else:
            self._inner.fill(mask)
        if self._start_mark:
            bits[self._start_mark[0] // 8] |= 1 << self._start_mark[0] % 8

    def accept(self, token: int) -> None:
        """See `core.GrammarState.accept`."""
        if self._start_mark and token == self._start_mark[0]:
            self._reasoning = True
            del self._start_mark[0]
        elif self._reasoning:
            self._accept_reasoning(token)
        else:
            self._start_mark.clear()
            self._inner.accept(token)

    def copy(self) -> GrammarState:
        following = copy(self)
        following._inner, following._start_mark = self._inner.copy(), self._start_mark[:]
        return following

    def forced(self) -> Sequence[int]:
        return () if self._reasoning or self._start_mark else self._inner.forced()

    @property
    def ended(self) -> bool:
        return not self._reasoning and self._inner.ended

    def _accept_reasoning(self, token: int) -> None:
        text, found, rest = (self._tail + self._tokenizer.token_bytes(token)).partition(self._end_mark)
        if not found:
            self._tail = text[max(0, len(text) - len(self._end_mark) + 1) :]
            return
        self._reasoning = False
        # A token rarely holds more than the end of the mark. If it does, the grammar must accept the rest.
        if rest := rest.strip():
            for following in self._tokenizer.encode(rest.decode("utf-8", "replace"), add_special_tokens=False):
                self._inner.accept(following)
