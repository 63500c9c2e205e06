"""Grammars that wrap another one: JSON with numbers of bounded length, and reasoning before the constrained text. The
reasoning before a free text may be bounded too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlx_parallm.core.grammar import Grammar, GrammarState
from mlx_parallm.core.text import TextTokenizer, overlap

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

    @property
    def free(self) -> bool:
        return False

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


class _Thoughts:
    """The reasoning of one text, up to its end mark. If it comes again, the budget is for all of it.

    _tail:    the last bytes, enough to recognise an end mark that is split over tokens
    _left:    tokens that may come before the end mark; None: any number
    _closing: the tokens that complete the end mark, once none is left; empty before

    Args:
        barred: tokens that must not come before the end mark.
    """

    def __init__(self, tokenizer: TextTokenizer, budget: int | None, barred: Collection[int]) -> None:
        assert tokenizer.reasoning is not None
        self._tokenizer = tokenizer
        self._end = tokenizer.reasoning.end
        self._barred = barred
        self._tail = b""
        self._left = budget
        self._closing = self._end_tokens() if budget == 0 else ()

    def fill(self, bits: memoryview) -> None:
        """Writes the tokens that may come next: all that are not barred, or the next one of the end mark."""
        bits[:] = bytes([0 if self._closing else _ALL_BITS]) * len(bits)
        if self._closing:
            bits[self._closing[0] // 8] |= 1 << self._closing[0] % 8
            return
        for token in self._barred:
            bits[token // 8] &= ~(1 << token % 8) & _ALL_BITS

    def accept(self, token: int) -> bytes | None:
        """Takes a token. Returns the text after the end mark if the token completes it, and None otherwise."""
        end_mark = self._end.encode()
        text, found, rest = (self._tail + self._tokenizer.token_bytes(token)).partition(end_mark)
        if found or len(self._closing) == 1:
            self._tail = b""
            self._closing = self._end_tokens() if self._left == 0 else ()
            return rest
        self._tail = text[max(0, len(text) - len(end_mark) + 1) :]
        self._closing = self._closing[1:]
        if self._left:
            self._left -= 1
            self._closing = self._end_tokens() if self._left == 0 else ()
        return None

    def forced(self) -> Sequence[int]:
        return self._closing

    def _end_tokens(self) -> tuple[int, ...]:
        """The end mark, or the rest of one that is begun, unless it is a token of its own."""
        whole = self._tokenizer.encode(self._end, add_special_tokens=False)
        begun = overlap(self._tail.decode("utf-8", "replace"), self._end) if len(whole) > 1 else 0
        return tuple(self._tokenizer.encode(self._end[begun:], add_special_tokens=False) if begun else whole)


@dataclass(frozen=True, slots=True)
class AfterReasoning:
    """Implements `core.Grammar`: free reasoning, its end mark, and then a text of `grammar`.

    Args:
        tokenizer: of a model that marks its reasoning.
        started: whether the prompt ends inside the reasoning. Otherwise a text either begins with the start mark, or
            follows `grammar` from its first token.
        budget: the number of tokens of reasoning after which the end mark is all that may come; None: no number.
    """

    grammar: Grammar
    tokenizer: TextTokenizer
    started: bool
    budget: int | None = None

    def start(self) -> GrammarState:
        return _AfterReasoningState(self.grammar.start(), self.tokenizer, self.started, self.budget)


class _AfterReasoningState:
    """Implements `core.GrammarState`.

    _start_mark: tokens of the start mark that are still to come; empty once the reasoning or the text has begun
    """

    def __init__(self, inner: GrammarState, tokenizer: TextTokenizer, started: bool, budget: int | None) -> None:
        assert tokenizer.reasoning is not None
        self._inner = inner
        self._tokenizer = tokenizer
        self._thoughts = _Thoughts(tokenizer, budget, barred=tokenizer.eos_token_ids)
        self._start_mark = [] if started else tokenizer.encode(tokenizer.reasoning.start, add_special_tokens=False)
        self._reasoning = started

    def fill(self, mask: memoryview) -> None:
        """See `core.GrammarState.fill`."""
        bits = mask.cast("B")
        if self._reasoning and not self._start_mark:
            self._thoughts.fill(bits)
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
        following._thoughts = copy(self._thoughts)
        return following

    def forced(self) -> Sequence[int]:
        if self._start_mark:
            return ()
        return self._thoughts.forced() if self._reasoning else self._inner.forced()

    @property
    def ended(self) -> bool:
        return not self._reasoning and self._inner.ended

    @property
    def free(self) -> bool:
        return False

    def _accept_reasoning(self, token: int) -> None:
        rest = self._thoughts.accept(token)
        if rest is None:
            return
        self._reasoning = False
        # A token rarely holds more than the end of the mark. If it does, the grammar must accept the rest.
        if rest := rest.strip():
            for following in self._tokenizer.encode(rest.decode("utf-8", "replace"), add_special_tokens=False):
                self._inner.accept(following)


@dataclass(frozen=True, slots=True)
class FreeText:
    """Implements `core.Grammar`: any text, whose reasoning has at most `budget` tokens. A text that has fewer is
    sampled as if it had no bound, so it may also end inside its reasoning.

    Args:
        tokenizer: of a model that marks its reasoning.
        started: whether the prompt ends inside the reasoning.
    """

    tokenizer: TextTokenizer
    started: bool
    budget: int | None

    def start(self) -> GrammarState:
        return _FreeTextState(self.tokenizer, self.started, self.budget)


class _FreeTextState:
    """Implements `core.GrammarState`.

    _before: the text in which the start mark may turn out to be; None if it may come no more
    """

    def __init__(self, tokenizer: TextTokenizer, started: bool, budget: int | None) -> None:
        assert tokenizer.reasoning is not None
        self._tokenizer = tokenizer
        self._thoughts = _Thoughts(tokenizer, budget, barred=())
        self._start_mark = tokenizer.reasoning.start.encode()
        self._repeats = tokenizer.reasoning.repeats
        self._before = None if started else b""
        self._reasoning = started

    def fill(self, mask: memoryview) -> None:
        """See `core.GrammarState.fill`."""
        bits = mask.cast("B")
        if self._reasoning:
            self._thoughts.fill(bits)
        else:
            bits[:] = bytes([_ALL_BITS]) * len(bits)

    def accept(self, token: int) -> None:
        """See `core.GrammarState.accept`."""
        if self._reasoning:
            self._reasoning = self._thoughts.accept(token) is None
            self._before = b"" if self._repeats else None
        elif self._before is not None:
            before = self._before + self._tokenizer.token_bytes(token)
            if self._repeats:
                self._reasoning, self._before = self._start_mark in before, before[-len(self._start_mark) :]
            else:
                before = before.lstrip()
                self._reasoning = before.startswith(self._start_mark)
                self._before = before if self._start_mark.startswith(before) else None

    def copy(self) -> GrammarState:
        following = copy(self)
        following._thoughts = copy(self._thoughts)
        return following

    def forced(self) -> Sequence[int]:
        return self._thoughts.forced() if self._reasoning else ()

    @property
    def ended(self) -> bool:
        return False

    @property
    def free(self) -> bool:
        return not self._reasoning and self._before is None
