"""From drawn tokens to released text: detokenizer, stop strings, end of sequence, length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.core import FinishReason, GrammarState, StopParams


class Detokenizes(Protocol):
    """Incremental text of one sequence: what `add` and `finish` return, joined, is the text."""

    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token releases, and whether the sequence ends with it."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces.

    Text that may be the start of a stop string is held back until it is known not to be.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Returns the text now known to be free of stops, and the stop string that ended it, if one did."""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: match[0])
            released, self._held = self._held[:at], ""
            return released, stop
        keep = self._possible_start()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released, None

    def flush(self) -> str:
        """The text still held back, at the end of the sequence."""
        released, self._held = self._held, ""
        return released

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """One sequence's text. Feed every drawn token, in order, until a delta carries a finish reason.

    Args:
        grammar: what the text follows, at its beginning; the text ends where nothing can follow.
    """

    def __init__(
        self,
        detokenizer: Detokenizes,
        stopping: StopParams,
        eos_ids: frozenset[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self.generated = 0
        self._detokenizer = detokenizer
        self._stopping = stopping
        self._eos_ids = frozenset() if stopping.ignore_eos else eos_ids
        self._matcher = StopMatcher(stopping.stop)
        self._grammar = grammar

    def accept(self, token: int) -> TextDelta:
        """Takes one drawn token. The end-of-sequence token ends the text and is not part of it.

        Raises:
            GrammarError: the grammar does not go on from here.
        """
        self.generated += 1
        if self._grammar is not None:
            self._grammar.accept(token)
        if token in self._eos_ids:
            return TextDelta(self._rest(), FinishReason.STOP)
        text = self._detokenizer.add(token)
        if self.generated < self._stopping.min_tokens:
            return TextDelta(text)
        released, stop = self._matcher.feed(text)
        if stop is not None:
            return TextDelta(released, FinishReason.STOP, stop)
        if self._grammar is not None and self._grammar.ended:
            return TextDelta(released + self._rest(), FinishReason.STOP)
        if self.generated >= self._stopping.max_tokens:
            return TextDelta(released + self._rest(), FinishReason.LENGTH)
        return TextDelta(released)

    def _rest(self) -> str:
        """What is still held back: an unfinished character, and what looked like a stop string."""
        return self._matcher.flush() + self._detokenizer.finish()
