"""Turns sampled tokens into text, and finds where it ends: stop strings, the end-of-sequence token, the length limit,
and repetition without end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_parallm.core.grammar import GrammarState
from mlx_parallm.core.requests import FinishReason, RepetitionLimits, StopParams

if TYPE_CHECKING:
    from mlx_parallm.model.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of the tokenizer that the engine uses.

    `detokenizer`: makes the detokenizer of one sequence, from its prompt and the special tokens to write as text.
    """

    size: int
    eos_ids: frozenset[int]
    detokenizer: Callable[[tuple[int, ...], frozenset[int]], Detokenizer]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that can be sent after one token, and why the sequence ends if this is its last token."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces.

    The first one is the one that ends first; of several that end there, the longest. Text that may be the start of a
    stop string is held back until it cannot be one any more, unless stop strings are part of the text. This runs on the
    device thread, so each character takes at most two comparisons for each stop string, however long the stop string
    is.
    """

    def __init__(self, stopping: StopParams) -> None:
        self._stops = tuple(map(_OneStop, stopping.stop, stopping.fallbacks))
        self._include_stop = stopping.include_stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns the text that is released now, and the stop string that ended it, if one did."""
        if not self._stops:
            return text, None
        before, self._held = len(self._held), self._held + text
        ends = [(end, -len(one.stop), one.stop) for one in self._stops if (end := one.feed(text)) is not None]
        if ends:
            end, _, stop = min(ends)
            return self._release(before + end - (0 if self._include_stop else len(stop)), keeps=False), stop
        may_be_stop = 0 if self._include_stop else max(one.matched for one in self._stops)
        return self._release(len(self._held) - may_be_stop), None

    def flush(self) -> str:
        """Returns the text still held back, at the end of the sequence."""
        return self._release(len(self._held))

    def _release(self, length: int, keeps: bool = True) -> str:
        released, self._held = self._held[:length], self._held[length:] if keeps else ""
        return released


class _OneStop:
    """Searches for one stop string (Knuth, Morris and Pratt). `matched`: the text so far ends with this many characters
    of the start of the stop string."""

    __slots__ = ("_fallbacks", "matched", "stop")

    def __init__(self, stop: str, fallbacks: tuple[int, ...]) -> None:
        self.stop = stop
        self._fallbacks = fallbacks
        self.matched = 0

    def feed(self, text: str) -> int | None:
        """Returns where in `text` the stop string ends; None if it does not end there."""
        stop, place, matched = self.stop, 0, self.matched
        if stop.startswith(text, matched):  # no need to look at each character
            place, matched = len(text), matched + len(text)
        while place < len(text) and matched < len(stop):
            if stop[matched] == text[place]:
                matched += 1
                place += 1
            elif matched:
                matched = self._fallbacks[matched]
                place += matched < 0
                matched = max(matched, 0)
            else:
                place = text.find(stop[0], place) % (len(text) + 1)  # if not found, -1 becomes the end
        self.matched = matched
        return place if matched == len(stop) else None


@dataclass(eq=False, slots=True)
class TextStream:
    """The text of one sequence. Takes every sampled token in order, until a delta has a finish reason.

    `end_ids`: the tokens that end the text. `grammar`: the grammar that constrains the text, in its first state; the
    text ends when the grammar allows no further token. `tokens`: those of the sequence, of which the last one is always
    the one that is taken; without them, repetition is not found. `generated`: tokens taken so far.
    """

    detokenizer: Detokenizer
    matcher: StopMatcher
    stopping: StopParams
    end_ids: frozenset[int]
    grammar: GrammarState | None = None
    tokens: Sequence[int] = ()
    generated: int = 0

    def accept(self, token: int) -> TextDelta:
        """Takes one sampled token. The end-of-sequence token and `stop_token_ids` end the text, and are part of it only
        with `include_stop`.

        Raises:
            GrammarError: the grammar does not allow the token here.
        """
        self.generated += 1
        if self.grammar is not None:
            self.grammar.accept(token)
        if token in self.end_ids:
            return TextDelta(self._last(token), FinishReason.STOP)
        if token in self.stopping.stop_token_ids:
            return TextDelta(self._last(token), FinishReason.STOP, token)
        text = self.detokenizer.add(token)
        if self.generated < self.stopping.min_tokens:
            return TextDelta(text)
        released, stop = self.matcher.feed(text)
        if stop is not None:
            return TextDelta(released, FinishReason.STOP, stop)
        if self.grammar is not None and self.grammar.ended:
            return TextDelta(released + self._rest(), FinishReason.STOP)
        if self.generated >= self.stopping.max_tokens:
            return TextDelta(released + self._rest(), FinishReason.LENGTH)
        if self._repeats():
            return TextDelta(released + self._rest(), FinishReason.REPETITION)
        return TextDelta(released)

    def _repeats(self) -> bool:
        """Whether the text repeats itself without end, and not because the grammar leaves it no choice. Looks at the
        tokens now and then only."""
        limits = self.stopping.repetition
        if limits is None or self.generated % CHECK_EVERY:
            return False
        return repeats(self.tokens, len(self.tokens) - self.generated, limits) and not (
            self.grammar is not None and self.grammar.forced()
        )

    def _last(self, token: int) -> str:
        """The end of a text that `token` ends."""
        own = self.detokenizer.add(token) if self.stopping.include_stop else ""
        return self.matcher.flush() + own + self.detokenizer.finish()

    def _rest(self) -> str:
        """The text still held back: an incomplete character, and text that looked like a stop string."""
        return self.matcher.flush() + self.detokenizer.finish()


# ---- repetition without end ---------------------------------------------------------------------

CHECK_EVERY = 31
"""Tokens between two checks of repetition. It is prime, so the checks of a loop see different places of its period."""
FEW_TOKENS = 8
"""Up to so many different tokens, a period may well be meant, as in a matrix of zeros or a table of empty cells."""
_FIRST = 16
"""Tokens that are compared before all of them are, because most texts differ there."""


def repeats(tokens: Sequence[int], start: int, limits: RepetitionLimits) -> bool:
    """Whether the tokens from `start` on end with a sequence that is repeated for as long as `limits` say.

    The shortest period decides. All longer ones are its multiples if `min_tokens` is at least twice `max_period` (Fine
    and Wilf, 1965).
    """
    generated = len(tokens) - start
    if generated < limits.min_tokens:
        return False
    for period in range(limits.min_period, min(limits.max_period, generated // limits.min_count) + 1):
        if tokens[-1 - period] != tokens[-1]:
            continue
        length = max(limits.min_tokens, limits.min_count * period)
        if _has_period(tokens, period, min(length, period + _FIRST)) and _has_period(tokens, period, length):
            meant = 1 < len(set(tokens[-period:])) <= FEW_TOKENS
            least = limits.min_tokens_of_few if meant else length
            return least <= generated and _has_period(tokens, period, least)
    return False


def _has_period(tokens: Sequence[int], period: int, length: int) -> bool:
    """Whether the last tokens, `length` of them, have this period: each but the first ones is equal to the one `period`
    places before it."""
    end = len(tokens)
    return tokens[end - length : end - period] == tokens[end - length + period :]
