"""Holds the text of an answer back from a line on that may begin a call which has to be repaired."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.core.text import RepairedCalls, Tool, ToolFormat

_MAX_TRIES = 4
"""Number of lines of which one may begin the calls at the end of a text."""
_LONGEST = 16_384
"""Number of characters of calls that are repaired: reading a text in every form takes time on the event loop, where all
requests wait for it."""
_SHORT = 1000
"""Number of characters of a text that is looked at whenever more comes."""


class HeldText:
    """Passes text on. What it holds back does not depend on how the text is cut into pieces: a line that cannot begin a
    call cannot begin one when more text comes either."""

    def __init__(self, calls: ToolFormat, tools: Sequence[Tool]) -> None:
        self._calls, self._tools = calls, tools
        self._held = ""
        self._asks_at = 0  # length of the held text at which it is looked at again
        self._at_line = True  # whether the held text is at the beginning of a line

    def feed(self, text: str) -> str:
        """Takes the next piece of the text. Returns the text that no repair can change."""
        self._held += text
        if len(self._held) < self._asks_at:
            return ""
        begin, _ = self._candidate(0, self._at_line)
        sure, self._held = self._held[:begin], self._held[begin:]
        self._at_line = self._at_line and not sure
        # A long text is looked at again when it is a quarter longer, so that the whole costs no more than its length.
        self._asks_at = len(self._held) * 5 // 4 if len(self._held) > _SHORT else 0
        return sure

    def end(self, ended: bool) -> tuple[str, RepairedCalls | None]:
        """Returns the rest of the text, and the calls after it. The next text begins a line.

        Args:
            ended: the model ended the text; otherwise nothing is repaired, because more might have followed.
        """
        text, at_line = self._held, self._at_line
        at, repaired, tries = 0, None, _MAX_TRIES if ended else 0
        while repaired is None and at < len(text) and tries:
            tries -= 1
            begin, content = self._candidate(at, at_line)
            if 0 < len(text) - content <= _LONGEST:
                repaired = self._calls.repaired(text[content:], self._tools)
            at, at_line = (begin if repaired else content), False
        self._held, self._at_line, self._asks_at = "", True, 0
        return text[:at] if repaired else text, repaired

    def _candidate(self, at: int, at_line: bool) -> tuple[int, int]:
        """Where the white space before the first line that may begin a call begins, and where this line does."""
        text = self._held
        while True:
            line = at if at_line else text.find("\n", at)
            stop = len(text) if line < 0 else line
            begin = at + len(text[at:stop].rstrip())
            content = len(text) if line < 0 else len(text) - len(text[line:].lstrip())
            if content == len(text) or self._calls.may_begin_call(text[content:], self._tools):
                return begin, content
            at, at_line = content, False
