"""Reads calls that a grammar enforces while the model writes them, so that each piece can be sent at once.

Generators follow the text as the grammar in `grammar` describes it. They yield a piece of a call, or None where they
need more text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mlx_parallm.core import CallPiece, JsonPosition, Tool, ToolCall, overlap
from mlx_parallm.model.tools.grammar import parameters_of, properties_of, value_types
from mlx_parallm.model.tools.syntax import CallSyntax

Result = TypeVar("Result")
Steps = Generator[CallPiece | None, None, Result]

_INDEX_DIGITS = 2
_CLOSING, _AFTER_SCALAR = '"}]', ",:}])<| \n"
"""The characters that end a text, an object or a list, and those that cannot be in a number or a word."""


class EnforcedCalls:
    """Implements `core.CallReader` for one family.

    Args:
        end: the mark after the calls.
        parse: reads one whole call, without marks; it gives the name and the id of each call.
    """

    def __init__(
        self, syntax: CallSyntax, end: str, tools: Sequence[Tool], parse: Callable[[str], Sequence[ToolCall]]
    ) -> None:
        self.rest: str | None = None
        self._syntax = syntax
        self._end = end
        self._parse = parse
        self._parameters = {tool["function"]["name"]: parameters_of(tool) for tool in tools}
        self._heading = _heading_pattern(syntax.call[0], self._parameters)
        self._longest_heading = len(syntax.call[0]) + max(map(len, self._parameters), default=0) + _INDEX_DIGITS
        self._text = ""  # what was fed and is not read yet
        self._steps = self._calls()

    def feed(self, text: str) -> Iterator[CallPiece]:
        """See `core.CallReader.feed`."""
        self._text += text
        for piece in self._steps:
            if piece is None:
                return
            yield piece
        self.rest = self._text

    def _calls(self) -> Steps[None]:
        between, closing = self._syntax.between, self._syntax.block[1] + self._end
        yield from self._next_of(self._syntax.block[0])
        while heading := (yield from self._next_heading()):
            yield from self._call(heading)
            found = yield from self._next_of(between or "", closing)
            if found != between:
                return

    def _call(self, heading: str) -> Steps[None]:
        syntax = self._syntax
        no_arguments = "{}" if syntax.argument is None else ""
        (call,) = self._parse(syntax.block[0] + heading + no_arguments + syntax.call[1] + syntax.block[1])
        yield CallPiece(name=call.name, call_id=call.call_id)
        if syntax.argument is None:
            yield from self._json()
            yield CallPiece(complete=True)
        else:
            yield from self._arguments(syntax.argument, self._parameters[call.name])
        yield from self._next_of(syntax.call[1])

    def _next_heading(self) -> Steps[str]:
        """Takes the text before the arguments of a call. Empty: something else comes next."""
        while (match := self._heading.match(self._text)) is None:
            if len(self._text) > self._longest_heading:
                return ""
            yield None
        return self._take(match.end())

    def _arguments(self, around: tuple[str, str], parameters: dict[str, Any]) -> Steps[None]:
        """Arguments that are written one by one, as the text of one JSON object."""
        schemas, comma, given = properties_of(parameters), "", 0
        while opening := (yield from self._next_of(*(openings := _openings(comma + around[0], schemas)))):
            key = openings[opening]
            yield CallPiece(f"{', ' if given else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            if self._syntax.bare is not None and "string" in value_types(schemas[key], parameters):
                yield from self._bare(self._syntax.bare, around[1])
            else:
                yield from self._next_of(self._syntax.plain)
                yield from self._json()
                yield from self._next_of(around[1])
            comma, given = self._syntax.comma, given + 1
        yield CallPiece("}" if given else "{}", complete=True)

    def _bare(self, quotes: tuple[str, str], after: str) -> Steps[None]:
        """A text without JSON's quotes, as a JSON string. `after`: the text that follows the closing quote."""
        yield from self._next_of(quotes[0])
        yield CallPiece('"')
        closing = quotes[1] + after
        while (end := self._text.find(closing)) < 0:
            yield from _arguments_piece(_escaped(self._take(len(self._text) - overlap(self._text, closing))))
            yield None
        yield CallPiece(_escaped(self._take(end)) + '"')
        self._take(len(closing))

    def _json(self) -> Steps[None]:
        """A JSON value, which is passed on as it is."""
        value = _JsonValue()
        while True:
            yield from _arguments_piece(self._take(value.length_in(self._text)))
            if value.ended:
                return
            yield None

    def _next_of(self, *marks: str) -> Steps[str]:
        """Takes the mark that comes next. Empty: none of them does. Empty marks do not count."""
        wanted = [mark for mark in marks if mark]
        while not (found := next(filter(self._text.startswith, wanted), "")):
            if not any(mark.startswith(self._text) for mark in wanted):
                return ""
            yield None
        return self._take(len(found))

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


class _JsonValue:
    """Finds the end of a JSON value in a text that comes in parts. The text must be valid JSON."""

    def __init__(self) -> None:
        self.ended = False
        self._position = JsonPosition()

    def length_in(self, text: str) -> int:
        """The number of characters of the next part that belong to the value."""
        position = self._position
        for at, char in enumerate(text):
            if not position.in_string and position.depth == 0 and char in _AFTER_SCALAR:
                self.ended = True
                return at
            position.read(char)
            if not position.in_string and position.depth == 0 and char in _CLOSING:
                self.ended = True
                return at + 1
        return len(text)


def _heading_pattern(before: str, names: Iterable[str]) -> re.Pattern[str]:
    """Matches the text before the arguments of a call of one of `names`."""
    stands_for = {"$name": f"(?:{'|'.join(map(re.escape, names))})", "$index": rf"\d{{1,{_INDEX_DIGITS}}}"}
    parts = re.split(r"(\$name|\$index)", before)
    return re.compile("".join(stands_for.get(part) or re.escape(part) for part in parts))


def _openings(before: str, keys: Iterable[str]) -> dict[str, str]:
    """The text before the value of each argument, and the argument's name."""
    return {before.replace("$key", key): key for key in keys}


def _arguments_piece(arguments: str) -> Iterator[CallPiece]:
    if arguments:
        yield CallPiece(arguments)


def _escaped(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
