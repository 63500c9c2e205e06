"""One choice's text, as it comes, split into reasoning, text and calls.

    SAYING ──reasoning's start, at the very beginning──▶ THINKING ──its end──▶ SAYING
    SAYING ──calls' start──▶ CALLING ──calls' end, or the end of the text──▶ SAYING

White space beside a mark belongs to the mark. What may be the beginning of a mark is held back, and so is white space
that a mark may follow. What stands between the marks of calls and is none is text, its marks with it. Where the text
is cut off inside a call, what there is of the call is a call that is not complete, and nothing of it is text.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum, auto

from mlx_parallm.core import Reasoning, Tool, ToolCall, ToolFormat
from mlx_parallm.server.respond.parts import CallPart, Part


class _Mode(Enum):
    THINKING = auto()
    SAYING = auto()
    CALLING = auto()


class Splitter:
    """Feed the pieces of one text in order, then `end`; all parts that come out, joined, depend on the text alone.

    Args:
        reasoning: None: there is none in the text.
        begun: the text begins inside the reasoning.
        calls: None: nothing in the text is a call.
        tools: those that may be called.
        most: calls; after the last one nothing more is read.
        calls_first: the text begins with a call, or has none.
    """

    def __init__(
        self,
        reasoning: Reasoning | None = None,
        begun: bool = False,
        calls: ToolFormat | None = None,
        tools: Sequence[Tool] = (),
        most: int = 1,
        calls_first: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._tools = tools
        self._most = most
        self._mode = _Mode.THINKING if begun else _Mode.SAYING
        self._calls_first = calls_first
        self._may_think = reasoning is not None and not begun
        self._trims = begun  # white space that comes now belongs to the mark before it
        self._held = ""
        self._space = ""  # white space before the last mark
        self._searched = 0  # in a call: its end mark is not before this
        self._ids: list[str] = []
        self._complete = True
        self._cut = False

    @property
    def called(self) -> bool:
        """Whether a tool has been called, and every call is complete."""
        return bool(self._ids) and self._complete

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are sure now."""
        if self._reasoning is None and self._calls is None:
            yield from _text(text)
            return
        self._held += text
        yield from self._split(ended=False)

    def end(self, cut: bool = False) -> Iterator[Part]:
        """What was held back. Call once, last. `cut`: the model had not ended its text."""
        self._cut = cut
        yield from self._split(ended=True)

    def _split(self, ended: bool) -> Iterator[Part]:
        steps = {_Mode.THINKING: self._think, _Mode.SAYING: self._say, _Mode.CALLING: self._call}
        before = None
        while before != (self._mode, len(self._held)):
            before = (self._mode, len(self._held))
            yield from steps[self._mode](ended)

    def _think(self, ended: bool) -> Iterator[Part]:
        assert self._reasoning is not None
        thought, mark = self._until([self._reasoning.end], ended)
        if thought:
            yield Part(reasoning=thought)
        if mark:
            self._mode, self._trims = _Mode.SAYING, True

    def _say(self, ended: bool) -> Iterator[Part]:
        if len(self._ids) >= self._most > 0 and self._calls is not None:
            self._held = ""  # as many calls as were wanted: nothing more is said
            return
        if self._may_think and self._begins_thought(ended):
            return
        if self._calls_first and not self._ids:
            self._rule_out_calls()
        marks = list(self._reasoning.around) if self._reasoning else []
        marks += [self._calls.start] if self._calls else []
        if self._cut:
            self._drop_begun_mark()
        said, mark = self._until(marks, ended)
        yield from _text(said)
        if mark:
            self._trims = True
            if self._calls is not None and mark == self._calls.start:
                self._mode, self._searched = _Mode.CALLING, 0

    def _rule_out_calls(self) -> None:
        """Where the text begins with something else than a call, nothing in it is one."""
        beginning, start = self._held.lstrip(), self._calls.start if self._calls else ""
        if not beginning.startswith(start) and not start.startswith(beginning):
            self._calls = None

    def _drop_begun_mark(self) -> None:
        """More than half of a start mark at the end of a text that was cut off belongs to a call, not to the text."""
        start = self._calls.start if self._calls else ""
        begun = _begun(self._held, start)
        if 2 * begun > len(start):
            self._held = self._held[:-begun].rstrip()

    def _begins_thought(self, ended: bool) -> bool:
        """Whether the text begins with the reasoning's mark, or may yet."""
        assert self._reasoning is not None
        beginning, start = self._held.lstrip(), self._reasoning.start
        if beginning.startswith(start):
            self._held = beginning[len(start) :]
            self._mode, self._trims, self._may_think = _Mode.THINKING, True, False
            return True
        if not ended and start.startswith(beginning):
            return True
        self._may_think = False
        return False

    def _call(self, ended: bool) -> Iterator[Part]:
        assert self._calls is not None
        end, body = self._calls.end, ""
        while end and (at := self._held.find(end, self._searched)) >= 0:
            body, self._searched = self._held[:at], at + len(end)
            if not self._calls.inside_value(body):
                yield from self._read(body, self._held[self._searched :], end)
                return
        if ended:
            yield from self._read(self._held, "", "")

    def _read(self, body: str, rest: str, end: str) -> Iterator[Part]:
        assert self._calls is not None
        self._mode, self._held = _Mode.SAYING, rest
        try:
            read = self._parsed(body, unfinished=self._cut and not end)
        except ValueError:
            self._trims = False
            yield Part(text=self._space + self._calls.start + body + end)
            return
        for call in read[: self._most - len(self._ids)]:
            yield Part(call=self._numbered(call))

    def _parsed(self, body: str, unfinished: bool) -> tuple[ToolCall, ...]:
        """Raises ValueError: there is no call."""
        assert self._calls is not None
        if unfinished:
            with suppress(ValueError):
                return self._calls.unfinished(body[: len(body) - _begun(body, self._calls.end)], self._tools)
        return self._calls.parse(body, self._tools)

    def _numbered(self, call: ToolCall) -> CallPart:
        """With the id that the model gave it, unless it has given it before."""
        given = call.call_id if call.call_id not in self._ids else None
        self._ids.append(given or f"call_{uuid.uuid4().hex[:24]}")
        self._complete = call.complete
        return CallPart(len(self._ids) - 1, call.arguments, self._ids[-1], call.name, call.complete)

    def _until(self, marks: Sequence[str], ended: bool) -> tuple[str, str]:
        """Takes what is held up to the first mark, and the mark; without one, all that cannot belong to a mark."""
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            self._space = before[len(before.rstrip()) :]
            return before.rstrip(), mark
        sure = len(self._held)
        if not ended:
            sure -= max((_begun(self._held, mark) for mark in marks), default=0)
            sure = len(self._held[:sure].rstrip()) if marks else sure
        before, self._held = self._held[:sure], self._held[sure:]
        return before, ""


def _begun(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if mark.startswith(text[-length:])), 0)


def _text(text: str) -> Iterator[Part]:
    if text:
        yield Part(text=text)
