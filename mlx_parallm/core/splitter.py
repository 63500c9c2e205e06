"""Splits the text of one chat choice, as it is generated, into reasoning, text and tool calls.

    TEXT ──start of reasoning──▶ REASONING ──its end──▶ TEXT
    TEXT ──start of calls──▶ CALL ──end of calls, or end of the text──▶ TEXT

Most families reason at the very beginning only; there, a start mark of reasoning in the text is text.

A mark is the text before or after a part, such as `<think>`. White space next to a mark belongs to the mark. Text that
may be the beginning of a mark is held back, and so is white space that may come before one. If the text between the
marks of a call is not a valid call, it stays text, and so do the marks. If the text is cut off inside a call, the call
is not complete, and no part of it becomes text.

If calls are repaired, text that can only mean calls becomes calls: it begins a line, and nothing but calls follows it.

A call that a grammar enforces comes in pieces, as the model writes it. Any other call comes whole, because it may still
turn out to be text.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_parallm.core.grammar import ReasoningPrefix
from mlx_parallm.core.text import (
    CallPiece,
    JsonPosition,
    Reasoning,
    RepairedCalls,
    RepairKind,
    Tool,
    ToolCall,
    overlap,
)

if TYPE_CHECKING:
    from mlx_parallm.model.tools.formats import ToolFormat
    from mlx_parallm.model.tools.reading import EnforcedCalls

MAX_CALLS_PER_ANSWER = 32


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """The parts that an answer may contain in addition to text, and how the model writes them."""

    reasoning: Reasoning | None = None
    """The marks around reasoning. None: the answer has none."""
    in_reasoning: bool = False
    """Whether the prompt has begun the reasoning, so that the answer starts inside it."""
    calls: ToolFormat | None = None
    """How tool calls are written. None: nothing in the answer is a call."""
    tools: tuple[Tool, ...] = ()
    """The tools that may be called."""
    max_calls: int = 1
    """Text after this many calls is dropped."""
    calls_first: bool = False
    """Whether calls must come first. If other text comes first, nothing after it is a call."""
    enforced: bool = False
    """Whether a grammar enforces the form of calls: the text after a start mark is valid calls of `tools`."""

    on_repair: Callable[[RepairKind], None] | None = None
    """Is called for each tool call that is repaired. None: none is repaired."""

    @property
    def visible_specials(self) -> frozenset[int]:
        """Special tokens that decoding must keep in the text, because the marks consist of them."""
        marks = [part.visible_specials for part in (self.reasoning, self.calls) if part is not None]
        return frozenset[int]().union(*marks)

    @property
    def opening(self) -> str:
        """What the model writes before a text that follows a grammar of the client."""
        return self.reasoning.opening if self.reasoning is not None else ""

    @property
    def reasoning_prefix(self) -> ReasoningPrefix:
        """Whether reasoning comes before the part of the answer that follows a grammar."""
        if self.reasoning is None:
            return ReasoningPrefix.NONE
        return ReasoningPrefix.OPEN if self.in_reasoning else ReasoningPrefix.OPTIONAL


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of call number `position` of a choice. The first part has `call_id` and `name`; in the others they are
    None.

    The `arguments` of all parts, joined, are JSON text. The last part is `complete`, unless the call was cut off; then
    they are the beginning of one.
    """

    position: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of a choice. At most one of the three fields is set."""

    reasoning: str = ""
    text: str = ""
    call: CallPart | None = None


@dataclass(frozen=True, slots=True)
class JoinedParts:
    """The parts of a choice, joined by kind. `calls` are in order of position."""

    reasoning: str
    text: str
    calls: tuple[CallPart, ...]

    @property
    def content(self) -> str | None:
        """The text, or None if there are reasoning or calls instead of it."""
        return self.text or (None if self.reasoning or self.calls else "")


def join_parts(parts: Iterable[AnswerPart]) -> JoinedParts:
    parts = tuple(parts)
    calls: dict[int, CallPart] = {}
    for part in parts:
        if part.call is not None:
            calls[part.call.position] = _join_call(calls.get(part.call.position), part.call)
    reasoning, text = "".join(part.reasoning for part in parts), "".join(part.text for part in parts)
    return JoinedParts(reasoning, text, tuple(calls[position] for position in sorted(calls)))


def _join_call(before: CallPart | None, call: CallPart) -> CallPart:
    if before is None:
        return call
    arguments = before.arguments + call.arguments
    return CallPart(call.position, arguments, before.call_id, before.name, call.complete)


def split(text: str, syntax: AnswerSyntax, cut: bool) -> JoinedParts:
    """The parts of a whole text. `cut`: something other than the model ended it."""
    splitter = Splitter(syntax)
    return join_parts([*splitter.feed(text), *splitter.end(cut)])


class Splitter:
    """Splits one text: call `feed` with its pieces in order, then `end`. The parts that they return, joined, are the
    same however the text is cut into pieces, so a stream and a whole answer are equal."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax = syntax
        self._reasoning = syntax.reasoning
        self._calls = syntax.calls
        self._read: Callable[[bool], Iterator[AnswerPart]]  # reads what comes next
        self._read = self._read_reasoning if syntax.in_reasoning else self._read_text
        self._may_reason = syntax.reasoning is not None and not syntax.in_reasoning
        self._trims = syntax.in_reasoning  # whether white space that comes next belongs to the last mark
        self._held = ""
        self._space = ""  # white space before the last mark
        self._start = ""  # in a call: its start mark
        self._reader: EnforcedCalls | None = None  # in a call that is enforced
        self._searched = 0  # in a call: number of characters already searched for its end mark
        self._position = JsonPosition()  # in a call: where these characters end
        self._ids: list[str] = []
        self._complete = True
        self._cut = False
        self._on_repair = syntax.on_repair
        self._text = HeldText(syntax.calls, syntax.tools) if syntax.calls and syntax.on_repair else None
        self.repaired: list[tuple[int, RepairKind]] = []
        """The positions of the calls that were repaired, and what was wrong with them."""

    @property
    def called(self) -> bool:
        """Whether there is at least one call and all are complete."""
        return bool(self._ids) and self._complete

    def feed(self, text: str) -> Iterator[AnswerPart]:
        """Takes the next piece of the text. The result is the parts that no later text can change."""
        if self._reasoning is None and self._calls is None and self._text is None:
            yield from _text(text)
            return
        self._held += text
        yield from self._split(ended=False)

    def end(self, cut: bool = False) -> Iterator[AnswerPart]:
        """The parts of the text that was held back. Call it once, last. `cut`: something other than the model ended the
        text."""
        self._cut = cut
        yield from self._split(ended=True)
        yield from self._settle()

    def _say(self, text: str) -> Iterator[AnswerPart]:
        yield from _text(self._text.feed(text) if self._text else text)

    def _settle(self) -> Iterator[AnswerPart]:
        """The parts of the text that may have begun a call to repair."""
        if self._text is None or self._on_repair is None:
            return
        text, repaired = self._text.end(ended=not self._cut)
        yield from _text(text)
        if repaired is None:
            return
        for call in repaired.calls[: self._syntax.max_calls - len(self._ids)]:
            self.repaired.append((len(self._ids), repaired.kind))
            self._on_repair(repaired.kind)
            yield AnswerPart(call=self._placed(call))

    def _split(self, ended: bool) -> Iterator[AnswerPart]:
        before = None
        while before != (self._read, len(self._held)):
            before = (self._read, len(self._held))
            yield from self._read(ended)

    def _read_reasoning(self, ended: bool) -> Iterator[AnswerPart]:
        assert self._reasoning is not None
        reasoning, mark = self._take_until([self._reasoning.end], ended)
        if reasoning:
            yield from self._settle()
            yield AnswerPart(reasoning=reasoning)
        if mark:
            self._read, self._trims = self._read_text, True

    def _read_text(self, ended: bool) -> Iterator[AnswerPart]:
        if len(self._ids) >= self._syntax.max_calls > 0 and self._calls is not None:
            self._held = ""
            return
        if self._may_reason and self._reasoning_begins(ended):
            return
        if self._syntax.calls_first and not self._ids:
            self._rule_out_calls()
        marks = self._marks()
        if self._cut:
            self._drop_begun_mark(marks)
        text, mark = self._take_until(marks, ended)
        yield from self._say(text)
        if mark:
            self._trims = True
            self._begin(mark)

    def _marks(self) -> list[str]:
        """The marks that may come in a text."""
        reasoning, calls = self._reasoning, self._calls
        marks = [*reasoning.around, *([reasoning.start] if reasoning.repeats else [])] if reasoning else []
        return [*marks, *calls.around, *calls.starts] if calls else marks

    def _begin(self, mark: str) -> None:
        """Begins what follows a mark."""
        if self._calls is not None and mark in self._calls.starts:
            if self._syntax.enforced:
                self._read, self._reader = self._read_pieces, self._calls.reader(self._syntax.tools)
                return
            self._read, self._start, self._searched = self._read_call, mark, 0
            self._position = JsonPosition()
        elif self._reasoning is not None and mark == self._reasoning.start:
            self._read = self._read_reasoning

    def _rule_out_calls(self) -> None:
        """Rules out calls if the text starts with something else than a mark."""
        beginning = self._held.lstrip()
        if not any(beginning.startswith(mark) or mark.startswith(beginning) for mark in self._marks()):
            self._calls = None

    def _drop_begun_mark(self, marks: Sequence[str]) -> None:
        """Drops an incomplete mark at the end of a cut-off text, if more than half of it, or a control token, is
        there."""
        for mark in marks:
            begun = overlap(self._held, mark)
            if 2 * begun > len(mark) or "|>" in mark[:begun]:
                self._held = self._held[:-begun].rstrip()
                return

    def _reasoning_begins(self, ended: bool) -> bool:
        """Whether the text starts with the start mark of reasoning, or may do so when more text comes."""
        assert self._reasoning is not None
        beginning, start = self._held.lstrip(), self._reasoning.start
        if beginning.startswith(start):
            self._held = beginning[len(start) :]
            self._read, self._trims, self._may_reason = self._read_reasoning, True, False
            return True
        if not ended and start.startswith(beginning):
            return True
        self._may_reason = False
        return False

    def _read_pieces(self, _: bool) -> Iterator[AnswerPart]:
        assert self._reader is not None
        text, self._held = self._held, ""
        for piece in self._reader.feed(text):
            if piece.name is not None and len(self._ids) == self._syntax.max_calls:
                self._read = self._read_text
                return
            yield AnswerPart(call=self._placed(piece))
        if self._reader.rest is not None:
            self._read, self._held = self._read_text, self._reader.rest

    def _read_call(self, ended: bool) -> Iterator[AnswerPart]:
        assert self._calls is not None
        end = self._calls.end
        while end and (at := self._held.find(end, self._searched)) >= 0:
            self._position.read(self._held[self._searched : at])
            self._searched = at + len(end)
            if not self._calls.inside_value(self._position):
                yield from self._end_call(self._held[:at], self._held[self._searched :], end)
                return
            self._position.read(end)
        if ended:
            yield from self._end_call(self._held, "", "")

    def _end_call(self, body: str, rest: str, end: str) -> Iterator[AnswerPart]:
        assert self._calls is not None
        self._read, self._held = self._read_text, rest
        try:
            calls = self._parse(body, unfinished=self._cut and not end)
        except ValueError:
            self._trims = False
            yield from self._say(self._space + self._start + body + end)
            return
        yield from self._settle()
        for call in calls[: self._syntax.max_calls - len(self._ids)]:
            yield AnswerPart(call=self._placed(call))

    def _parse(self, body: str, unfinished: bool) -> tuple[ToolCall, ...]:
        """The calls in the text between two marks. Raises ValueError if the text is not a valid call."""
        assert self._calls is not None
        if unfinished:
            with suppress(ValueError):
                return self._calls.unfinished(body[: len(body) - overlap(body, self._calls.end)], self._syntax.tools)
        return self._calls.parse(body, self._syntax.tools)

    def _placed(self, call: ToolCall | CallPiece) -> CallPart:
        """The call, or its next piece, with its position. A new call also gets its id: the model's, or a new one if
        that is missing or already used."""
        self._complete = call.complete
        if call.name is None:
            return CallPart(len(self._ids) - 1, call.arguments, complete=call.complete)
        given = call.call_id if call.call_id not in self._ids else None
        self._ids.append(given or f"call_{uuid.uuid4().hex[:24]}")
        return CallPart(len(self._ids) - 1, call.arguments, self._ids[-1], call.name, call.complete)

    def _take_until(self, marks: Sequence[str], ended: bool) -> tuple[str, str]:
        """Takes the text before the first mark, and the mark. If there is no mark, takes the text that cannot belong to
        one."""
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
            sure -= max((overlap(self._held, mark) for mark in marks), default=0)
            sure = len(self._held[:sure].rstrip()) if marks else sure
        before, self._held = self._held[:sure], self._held[sure:]
        return before, ""


def _text(text: str) -> Iterator[AnswerPart]:
    if text:
        yield AnswerPart(text=text)


# -- text that may begin a call to repair --------------------------------------------------------

_MAX_TRIES = 4
"""Number of lines of which one may begin the calls at the end of a text."""
_MOST_READ = 16_384
"""Number of characters that these tries read, together: reading a text in every form takes time on the event loop,
where all requests wait for it."""
_NOT_SPACE = re.compile(r"\S")
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
        at, repaired, tries, left = 0, None, _MAX_TRIES if ended else 0, _MOST_READ
        while repaired is None and at < len(text) and tries:
            tries -= 1
            begin, content = self._candidate(at, at_line)
            if 0 < len(text) - content <= left:
                left -= len(text) - content
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
            found = None if line < 0 else _NOT_SPACE.search(text, line)
            content = found.start() if found else len(text)
            if content == len(text) or self._calls.may_begin_call(text, self._tools, content):
                return begin, content
            at, at_line = content, False
