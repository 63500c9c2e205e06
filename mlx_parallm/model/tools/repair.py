"""Reads calls that models write in another family's form, with a wrong quote, without their end, or in a fenced block.

A repair is a change of the text after which exactly one reading is left that accounts for all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_parallm.core.splitter import MAX_CALLS_PER_ANSWER, AnswerSyntax, split
from mlx_parallm.core.text import RepairedCalls, RepairKind, Tool, ToolCall
from mlx_parallm.model.tools.grammar import parameters_of, properties_of
from mlx_parallm.model.tools.reading import written

if TYPE_CHECKING:
    from mlx_parallm.model.tools.formats import ToolFormat

_BLOCK = re.compile(r"`{3,}[\w-]*\s*(.*?)(?:\n```\s*|\Z)", re.DOTALL)
"""A fenced block, up to the end of the text if it is not closed."""
_JSON_BEGINS = re.compile(r'[\[{](?=\s*["\'{\[}\]])')
_JSON_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[-+.\w]+)', re.DOTALL)
_MISWRITTEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'((?:[^\'\\]|\\.)*)\'|,(?=\s*[}\]])|\b(?:True|False|None)\b', re.DOTALL)
_NO_SEPARATOR = re.compile(r"[^ \t\r\n,;]")
_DECODER = json.JSONDecoder()
_RIGHT = {",": "", "True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}
_NAMES, _ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters")
_OTHER_FIELDS = {"type", "id", "tool_call_id"}
_LONGEST_OPENING = 512

Reading = tuple["ToolFormat", str]
"""A text, and the format that may read it."""


# -- where a call may begin ----------------------------------------------------------------------


class Openings:
    """What calls of some tools begin with, without white space. JSON begins a call only with the name of a tool."""

    def __init__(self, names: Collection[str], formats: Iterable[ToolFormat]) -> None:
        self._whole = _all_openings(names, formats)
        self._longest = max(map(len, self._whole))
        self._parts = {opening[:end] for opening in self._whole for end in range(len(opening) + 1)}

    def may_begin(self, text: str, at: int) -> bool:
        """Whether a line that begins like `text` from `at` on may begin a call. False stays false when more text
        comes."""
        if _squeezed(text[at : at + 1]) not in self._parts:
            return False  # of a long text, most lines cost no more than this
        text = text[at:]
        while text:
            block = _BLOCK.match(text)
            inner, after = (block[1], text[block.end() :]) if block else self._first_value(text)
            begun = _squeezed(inner[:_LONGEST_OPENING])
            if not begun.startswith(self._whole) and begun not in self._parts:
                return False
            text = after
        return True

    def _first_value(self, text: str) -> tuple[str, str]:
        """The JSON value that a text begins with, and the text after it. While there is none: the whole text. Only a
        text that begins a call is read beyond its beginning: many lines may begin a value that never ends."""
        begins = _squeezed(text[:_LONGEST_OPENING]).startswith(self._whole)
        with suppress(ValueError, RecursionError):
            _, end = _DECODER.raw_decode(text if begins else text[: self._longest])
            return text[:end], text[end:].lstrip("}],; \t\r\n")
        return text, ""


def _all_openings(names: Collection[str], formats: Iterable[ToolFormat]) -> tuple[str, ...]:
    openings = {"```", '{"type":"function"', '[{"type":"function"'}
    fields = ['{"name":"', '{"function":"', '{"function":{"name":"']
    for each in formats:
        openings |= {_squeezed(start) for start in each.starts if not start.startswith("{")}
        forms = (each.syntax, *each.syntax.native) if each.syntax else ()
        fields += [_squeezed(block + form.prefix) for form in forms for block in {"", form.block[0]}]
    for field in filter(None, fields):
        before, index, _ = field.partition("$index")
        openings |= {before} if index else {bracket + before + name for name in names for bracket in ("", "[")}
    return tuple(openings)


def _squeezed(text: str) -> str:
    return "".join(text.split()).replace("'", '"')


# -- repairs -------------------------------------------------------------------------------------


def repaired_calls(text: str, tools: Sequence[Tool], formats: Sequence[ToolFormat]) -> RepairedCalls | None:
    """The calls that a text means; None if it may mean anything else."""
    inner = _unfenced(text)
    kind: RepairKind = "form" if inner == text else "fence"
    repairs: list[tuple[RepairKind, Iterable[Reading]]] = [
        (kind, ((each, inner) for each in formats)),
        ("quotes", ((each, mended) for mended in _requoted(inner) for each in formats)),
        ("end", _ended(inner, formats)),
    ]
    for kind, readings in repairs:
        found = {calls for each, mended in readings for calls in _read(each, mended, tools)}
        if found:
            return RepairedCalls(kind, found.pop()) if len(found) == 1 else None
    return None


def _unfenced(text: str) -> str:
    """The text inside fenced blocks if there is no other text; else the text as it is."""
    return text if _BLOCK.sub("", text) else "\n".join(_BLOCK.findall(text))


def _requoted(text: str) -> Iterator[str]:
    """The text with valid JSON, if it had single quotes, Python's names, a comma too many or a raw line break."""
    end = max(text.rfind("}"), text.rfind("]")) + 1
    if begin := _JSON_BEGINS.search(text, 0, end):
        with suppress(ValueError, RecursionError):
            value = json.loads(_MISWRITTEN.sub(_right, text[begin.start() : end]), strict=False)
            yield text[: begin.start()] + json.dumps(value, ensure_ascii=False) + text[end:]


def _right(token: re.Match[str]) -> str:
    if token[1] is None:
        return _RIGHT.get(token[0], token[0])
    return '"' + re.sub(r'(?<!\\)"', r"\"", token[1].replace("\\'", "'")) + '"'


def _ended(text: str, formats: Sequence[ToolFormat]) -> Iterator[Reading]:
    """The text with the brackets and the marks that its end lacks."""
    for closed in {text, _with_brackets(text)}:
        for each in formats:
            yield each, closed
            for form in (each.syntax, *each.syntax.native) if each.syntax else ():
                block = form.block[1] + each.end
                yield from ((each, closed + end) for end in (each.end, block, form.call[1] + block))


def _with_brackets(text: str) -> str:
    """The text in which each bracket of the first JSON value is closed, and none is closed twice."""
    begin = _JSON_BEGINS.search(text)
    at, open_brackets = begin.start() if begin else len(text), ""
    mended = text[:at]
    while token := _JSON_TOKEN.match(text, at):
        if token[1] in _CLOSING:
            open_brackets = _CLOSING[token[1]] + open_brackets
        elif token[1] in _CLOSING.values():
            missing, closed, open_brackets = open_brackets.partition(token[1])
            if not closed:
                return text
            mended += missing
        mended, at = mended + token[0], token.end()
        if not open_brackets:
            return mended + text[at:].lstrip("}]")
    return mended + open_brackets + text[at:]


# -- readings ------------------------------------------------------------------------------------


def _read(each: ToolFormat, text: str, tools: Sequence[Tool]) -> Iterator[tuple[ToolCall, ...]]:
    """The calls of a text that has nothing else, with or without the marks of a format."""
    for mark in each.around:
        text = text.replace(mark, "")
    said = split(text, AnswerSyntax(calls=each, tools=tuple(tools), max_calls=MAX_CALLS_PER_ANSWER), cut=False)
    found = tuple(ToolCall(part.name or "", part.arguments) for part in said.calls if not said.text.strip())
    if not said.calls:
        with suppress(ValueError):
            found = tuple(
                replace(call, call_id=None) for call in each.parse(text.rstrip().removesuffix(each.end), tools)
            )
    if found and _fit(found, tools) and _all_read(each, found, text):
        yield found


def _fit(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> bool:
    """Whether each call has the required arguments, and no other than its schema names or allows."""
    schemas = {tool["function"]["name"]: parameters_of(tool) for tool in tools}
    for call in calls:
        schema, keys = schemas[call.name], set(json.loads(call.arguments))
        unknown = keys - set(properties_of(schema)) and not schema.get("additionalProperties", False)
        if unknown or not keys.issuperset(schema.get("required", ())):
            return False
    return True


def _all_read(each: ToolFormat, calls: Sequence[ToolCall], text: str) -> bool:
    """Whether the calls, written in the form of the format, have all characters of the text; parsers may skip some."""
    if each.parser is plain_json or each.syntax is None:
        return each.parser is plain_json
    named = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
    marks = [("", ""), ("", each.end), *((start, each.end) for start in each.starts)]
    forms = [each.syntax, *each.syntax.native]
    tags = [
        each.end * (len(each.end) > 1),
        *(_bare(form.argument[0].partition("$key")[0]) for form in forms if form.argument),
    ]
    if any(tag and tag in _bare(call.arguments) for tag in tags for call in calls):
        return False  # the end of a value may be missing
    # Between tags, a string may have no quotes where the family writes some.
    forms += [replace(form, bare=("", "")) for form in forms if form.argument and not form.comma and not form.bare]
    return _bare(text) in [_bare(written(form, around, named)) for form in forms for around in marks]


def _bare(text: str) -> str:
    """The text without what a reading may change: white space, the kind of quotes, and the case of `True`."""
    return _squeezed(text).replace("\\", "").casefold()


def plain_json(text: str, _: Any) -> list[dict[str, Any]]:
    """Calls as JSON objects, one after another or in a list, with the names of fields that any family has. Raises
    ValueError: it is anything else."""
    calls: list[dict[str, Any]] = []
    begin, end = 0, len(text.rstrip())
    while begin < end:
        found = _NO_SEPARATOR.search(text, begin)
        value, begin = _DECODER.raw_decode(text, found.start() if found else end)
        calls += map(_plain_call, value if isinstance(value, list) else [value])
    return calls


def _plain_call(value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        if not value.keys() <= {"function", *_OTHER_FIELDS}:
            raise ValueError("it has other fields")
        value = value["function"]
    keys = value.keys() - _OTHER_FIELDS if isinstance(value, dict) else set()
    names, arguments = keys.intersection(_NAMES), keys.intersection(_ARGUMENTS)
    if len(names) != 1 or len(arguments) != 1 or len(keys) != 2:
        raise ValueError("it is not a call")
    return {"name": value[names.pop()], "arguments": value[arguments.pop()]}
