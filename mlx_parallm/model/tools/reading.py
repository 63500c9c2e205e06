"""Reads and writes calls as a `CallSyntax` says: whole calls, calls that were cut off, calls that a grammar enforces
while the model writes them, and the text of earlier calls.

A call is recognised by its prefix, the text before the name of the tool. White space is ignored in the comparison,
except in enforced calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from mlx_parallm.core.text import CallPiece, JsonPosition, Tool, ToolCall, overlap
from mlx_parallm.model.tools.grammar import CallSyntax, parameters_of, properties_of, value_types

_DECODER = json.JSONDecoder()
_STANDS_FOR = {"$name": r"(?P<name>[\w.-]*)", "$index": r"\d+", "$key": r"(?P<key>[^\"]{1,256})"}
_SPACE = r"\s*+"
"""Possessive: a run of white space is read once, although two patterns may meet in it."""
_MAX_TRIES, _MOST_TRIED = 8, 1 << 16
"""Ends of arguments at which a text that was cut off is read, and the characters of all these texts but the first."""
_MOST_OPEN_TAGS = 24
"""Tags of arguments before the next one that ends an argument. A value may quote some."""


# -- whole calls ---------------------------------------------------------------------------------


def whole_calls(syntax: CallSyntax, text: str) -> list[dict[str, Any]]:
    """The calls of `text`, which is all text between two marks. Raises ValueError: it is anything else."""
    for form in (syntax, *syntax.native):
        with suppress(ValueError, RecursionError):
            return _calls_of_form(form, text)
    raise ValueError("it is not a call")


def _calls_of_form(form: CallSyntax, text: str) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    following = _matched(form.block[0] + form.call[0], text, 0)
    while following is not None:
        if form.argument is None:
            arguments, at = _DECODER.raw_decode(text, _after(" ", text, following.end()))
        else:
            arguments, at = _named(form, text, following.end())
        calls.append({"name": following["name"], "arguments": arguments})
        at = _after(form.call[1], text, at)
        following = None if form.between is None else _matched(form.between + form.call[0], text, at)
    if not calls or text[_after(form.block[1], text, at) :].strip():
        raise ValueError("it is not calls alone")
    return calls


def _named(form: CallSyntax, text: str, at: int) -> tuple[dict[str, Any], int]:
    """Arguments that are written one by one, and where they end."""
    assert form.argument is not None
    assert form.bare is not None
    arguments: dict[str, Any] = {}
    closing = form.bare[1] + form.argument[1].strip()
    while (opening := _matched(form.argument[0], text, at)) is not None:
        is_bare = text.startswith(form.bare[0], opening.end())
        begin = opening.end() + len(form.bare[0] if is_bare else form.plain)
        end = text.index(closing, begin)
        arguments[opening["key"]] = text[begin:end] if is_bare else json.loads(text[begin:end])
        at = end + len(closing)
    return arguments, at


def _after(fixed: str, text: str, at: int) -> int:
    match = _matched(fixed, text, at)
    if match is None:
        raise ValueError("it does not go on like a call")
    return match.end()


def _matched(fixed: str, text: str, at: int) -> re.Match[str] | None:
    return _pattern(fixed).match(text, at)


@cache
def _pattern(fixed: str) -> re.Pattern[str]:
    """Matches a fixed text with any white space around its characters, and what its placeholders stand for."""
    parts = re.split(r"(\$name|\$index|\$key)", fixed)
    return re.compile("".join(_STANDS_FOR.get(part) or _spaced(part) for part in parts))


@cache
def _searched(fixed: str) -> re.Pattern[str]:
    """As `_pattern`, to be searched for: no search begins at each character of a run of white space."""
    return re.compile(_pattern(fixed).pattern.removeprefix(_SPACE))


def _spaced(text: str) -> str:
    return _SPACE + "".join(re.escape(char) + _SPACE for char in _without_spaces(text)) if text else ""


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def is_left_open(syntax: CallSyntax, text: str) -> bool:
    """Whether one argument after another begins in a text and none ends, or braces do. The regular expressions of some
    parsers take the square or the cube of such a text's length, and all other requests wait meanwhile."""
    forms = [form for form in (syntax, *syntax.native) if form.argument]
    return any(_has_open_tags(form.argument, text) or _has_open_braces(form, text) for form in forms if form.argument)


def _has_open_tags(argument: tuple[str, str], text: str) -> bool:
    tags = re.findall(r"<\|\w+\|>\w+|</?[\w:]+", "".join(argument))
    open_tags = 0
    for tag in re.findall("|".join(map(re.escape, tags)), text) if tags else ():
        open_tags = 0 if tag == tags[-1] else open_tags + 1
        if open_tags > _MOST_OPEN_TAGS:
            return True
    return False


def _has_open_braces(form: CallSyntax, text: str) -> bool:
    """Whether a brace or a string is left open, in the form of a family that writes calls with these."""
    if not form.call[0].endswith("{") or not form.bare:
        return False
    begin, end = map(re.escape, form.bare)
    depth = 0
    for token in re.findall(rf"[{{}}]|{begin}(?:.*?{end})?", text, re.DOTALL):
        if token == form.bare[0]:
            return True
        depth = max(0, depth + {"{": 1, "}": -1}.get(token, 0))
    return depth > 0


# -- writing -------------------------------------------------------------------------------------


def written(syntax: CallSyntax, marks: tuple[str, str], calls: Sequence[Mapping[str, Any]]) -> str:
    """The text of calls, each with a name and arguments."""
    before, after = marks[0] + syntax.block[0], syntax.block[1] + marks[1]
    texts = [_written_call(syntax, index, call) for index, call in enumerate(calls)]
    if syntax.between is None:
        return syntax.join.join(before + text + after for text in texts)
    return before + syntax.between.join(texts) + after


def _written_call(syntax: CallSyntax, index: int, call: Mapping[str, Any]) -> str:
    heading = syntax.call[0].replace("$index", str(index)).replace("$name", call["name"])
    return heading + _written_arguments(syntax, call["arguments"]) + syntax.call[1]


def _written_arguments(syntax: CallSyntax, arguments: Any) -> str:
    if isinstance(arguments, str):  # of a client; they are no object
        return arguments
    if syntax.argument is None:
        return json.dumps(arguments, ensure_ascii=False)
    before, after = syntax.argument
    texts = [before.replace("$key", key) + _written_value(syntax, value) + after for key, value in arguments.items()]
    return syntax.comma.join(texts)


def _written_value(syntax: CallSyntax, value: Any) -> str:
    if syntax.bare is not None and isinstance(value, str):
        return syntax.bare[0] + value + syntax.bare[1]
    return syntax.plain + json.dumps(value, ensure_ascii=False)


# -- calls whose text was cut off ----------------------------------------------------------------

Parse = Callable[[str], Sequence[ToolCall]]
"""Parses text between marks. Raises ValueError: it is not a call of a known tool."""


def cut_off_calls(syntax: CallSyntax, parse: Parse, text: str, names: frozenset[str]) -> tuple[ToolCall, ...]:
    """The calls of `text`, which follows a start mark and has no end mark. Empty: the first name is incomplete.

    Only the last call may be incomplete; its `arguments` are then the beginning of a JSON text.

    Args:
        names: the tools that may be called.

    Raises:
        ValueError: no call begins like this.
    """
    for form in sorted((syntax, *syntax.native), key=lambda form: not _has_argument(form, text)):
        with suppress(ValueError):
            if form.argument is None:
                return tuple(_json_calls(form, text, names))
            return tuple(_calls_by_argument(form, parse, text, names))
    raise ValueError("no call begins like this")


def _has_argument(syntax: CallSyntax, text: str) -> bool:
    """Whether the text has an argument of this form. Arguments that are one JSON object look alike in all forms."""
    return syntax.argument is not None and syntax.argument[0].partition("$key")[0] in text


def _json_calls(syntax: CallSyntax, text: str, names: frozenset[str]) -> Iterator[ToolCall]:
    """Calls of a family whose arguments are one JSON object, which is the first object after the name."""
    match = _match_first(syntax, text, names)
    while match is not None:
        name, at = match.group("name"), text.find("{", match.end())
        try:
            arguments, end = _DECODER.raw_decode(text, at) if at >= 0 else (None, 0)
        except (ValueError, RecursionError):
            arguments = None
        if arguments is None:
            yield ToolCall(name, text[at:] if at >= 0 else "", complete=False)
            return
        yield ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        match = _match_next(syntax, text, end, names)


def _calls_by_argument(syntax: CallSyntax, parse: Parse, text: str, names: frozenset[str]) -> Iterator[ToolCall]:
    """Calls of a family that writes each argument separately: as much of them as can be parsed when it is closed."""
    calls: Sequence[ToolCall] = ()
    end, in_call = 0, False
    tries = min(_MAX_TRIES, 1 + _MOST_TRIED // (len(text) + 1))
    for end, in_call in islice(_closed_parts(syntax, text), tries):
        with suppress(ValueError):
            calls = parse(text[:end] + (syntax.call[1] if in_call else "") + syntax.block[1])
            break
    if calls and in_call:
        yield from calls[:-1]
        arguments = calls[-1].arguments.removesuffix("}")
        yield ToolCall(calls[-1].name, arguments if arguments != "{" else "", complete=False)
        return
    yield from calls
    match = _match_next(syntax, text, end, names) if calls else _match_first(syntax, text, names)
    if match is not None:
        yield ToolCall(match.group("name"), "", complete=False)


def _closed_parts(syntax: CallSyntax, text: str) -> Iterator[tuple[int, bool]]:
    """Where arguments and calls end in a text, the last first, and whether the call goes on there. If the same quote
    opens and closes values, only ends with an even number of quotes before them count."""
    assert syntax.argument is not None
    opening, closing = syntax.bare or ("", "")
    argument, call = (closing + syntax.argument[1]).strip(), syntax.call[1].strip()
    found = re.finditer(re.escape(argument or syntax.comma.strip()), text)
    ends = {each.end() if argument else each.start(): True for each in found}
    if call:
        ends |= {each.end(): False for each in re.finditer(re.escape(call), text)}
    for end in sorted(ends, reverse=True):
        if not opening or opening != closing or text.count(closing, 0, end) % 2 == 0:
            yield end, ends[end]


def _match_first(syntax: CallSyntax, text: str, names: frozenset[str]) -> re.Match[str] | None:
    """The prefix and name at the beginning of `text`; None while they are incomplete. Raises ValueError: no call."""
    prefix = syntax.block[0] + syntax.prefix
    match = _matched(prefix + "$name", text, 0)
    if match is None:
        begun = _without_spaces(text)
        if "$index" in prefix:
            begun = re.sub(r"\d+", "$index", begun)
        if not _without_spaces(prefix).startswith(begun):
            raise ValueError("it is not the beginning of a call")
        return None
    name = match.group("name")
    if match.end() == len(text) and any(known.startswith(name) for known in names):
        return None
    if name not in names:
        raise ValueError("it names no tool")
    return match


def _match_next(syntax: CallSyntax, text: str, start: int, names: frozenset[str]) -> re.Match[str] | None:
    """The prefix and name of one more call, after `start`."""
    if syntax.between is None:
        return None
    match = _searched(syntax.between + syntax.prefix + "$name").search(text, start)
    return match if match is not None and match.end() < len(text) and match.group("name") in names else None


# -- calls that a grammar enforces, piece by piece -----------------------------------------------
#
# Generators follow the text as the grammar describes it. They yield a piece of a call, or None where they need more
# text.

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
        while True:
            openings = {(comma + around[0]).replace("$key", key): key for key in schemas}
            opening = yield from self._next_of(*openings)
            if not opening:
                break
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
        position, ended = JsonPosition(), False
        while not ended:
            length, ended = _json_value_in(self._text, position)
            yield from _arguments_piece(self._take(length))
            if not ended:
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


def _json_value_in(text: str, position: JsonPosition) -> tuple[int, bool]:
    """The number of characters of the next part of a valid JSON value that belong to it, and whether it ends there.
    `position`: where the parts before it end; it is moved on."""
    for at, char in enumerate(text):
        if not position.in_string and position.depth == 0 and char in _AFTER_SCALAR:
            return at, True
        position.read(char)
        if not position.in_string and position.depth == 0 and char in _CLOSING:
            return at + 1, True
    return len(text), False


def _heading_pattern(before: str, names: Iterable[str]) -> re.Pattern[str]:
    """Matches the text before the arguments of a call of one of `names`."""
    stands_for = {"$name": f"(?:{'|'.join(map(re.escape, names))})", "$index": rf"\d{{1,{_INDEX_DIGITS}}}"}
    parts = re.split(r"(\$name|\$index)", before)
    return re.compile("".join(stands_for.get(part) or re.escape(part) for part in parts))


def _arguments_piece(arguments: str) -> Iterator[CallPiece]:
    if arguments:
        yield CallPiece(arguments)


def _escaped(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
