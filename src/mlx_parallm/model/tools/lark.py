"""Grammars of calls, in llguidance's Lark: what a family writes, so that its parser reads valid arguments back.

start    the whole text
call_0   a call of tool 0; `call` any of them
args_0   its arguments; `rest_0_2` those from the third on, `more_0_2` the same after another argument
arg_0_2  the value of the third
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_parallm.core import COMPACT_JSON, Tool, UnwritableToolError, with_bounded_integers
from mlx_parallm.model.tools.schemas import kinds, parameters_of, properties_of, resolved
from mlx_parallm.model.tools.syntax import Syntax

_TEXT = r"/[^\x00-\x08\x0b-\x1f\x7f]*/"
_TRIMMED = r"/([^\s\x00-\x1f\x7f]((?s:.*)[^\s\x00-\x1f\x7f])?)?/"
_NOT_NULL = "~/[nN][uU][lL][lL]/"
"""Parsers trim bare text, and take the word null for the value of that name."""
_SAID_OF_TEXT = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_SAYS_NOTHING = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "nullable"})
_COMPOSED = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "not", "if")


def grammar(syntax: Syntax, marks: tuple[str, str], tools: Sequence[Tool], most: int, free: bool) -> str:
    """See `core.ToolFormat.grammar`; `marks` are the start mark and the end mark."""
    start, end = marks
    inside = "call" if syntax.between is None else _repeated("call", syntax.between, most)
    body = _sequence(literal(syntax.block[0]), inside, literal(syntax.block[1] + end))
    lines = ["%llguidance {}", *_start(syntax, start, most, free), f"body: {body}"]
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        try:
            lines += _call(syntax, end, index, tool)
        except ValueError as error:
            raise UnwritableToolError(index, str(error)) from None
    return "\n".join([*lines, "INDEX: /[0-9]|[1-9][0-9]/", ""])


def literal(text: str) -> str:
    """Lark for exactly this text; nothing for no text."""
    return json.dumps(text) if text else ""


def _start(syntax: Syntax, start: str, most: int, free: bool) -> Iterator[str]:
    if free:
        yield "start: " + ("(head body)* TEXT" if most > 1 else "TEXT | head body")
        yield f"head[lazy]: TEXT {literal(start)}"
        yield "TEXT: /(?s:.*)/"
    else:
        yield "start: " + (_repeated("marked", syntax.join, most) if syntax.between is None else "marked")
        yield f"marked: {literal(start)} body"


def _repeated(rule: str, between: str, most: int) -> str:
    return f"{rule} ({literal(between)} {rule}){{0,{most - 1}}}" if most > 1 else rule


def _sequence(*parts: str) -> str:
    """Those that are there; of nothing, the empty text."""
    return " ".join(filter(None, parts)) or '""'


def _call(syntax: Syntax, end: str, index: int, tool: Tool) -> Iterator[str]:
    name = tool["function"]["name"]
    if not re.fullmatch(syntax.names[0], name):
        raise ValueError(f"this model cannot write the name {name!r}")
    before, after = (part.replace("$name", name) for part in syntax.call)
    yield f"call_{index}: " + _sequence(_numbered(before), f"args_{index}", literal(after))
    parameters = _object(parameters_of(tool))
    if syntax.argument is None:
        yield f"args_{index}: {_json(parameters)}"
    else:
        yield from _arguments(syntax, end, index, parameters)


def _numbered(text: str) -> str:
    return " INDEX ".join(map(literal, text.split("$index")))


def _object(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of one JSON object, which has no other arguments than those that are told, unless it says so."""
    if parameters.get("type", "object") != "object":
        raise ValueError('the parameters of a function are an object: their type must be "object"')
    closed = {} if any(word in parameters for word in _COMPOSED) else {"additionalProperties": False}
    return {**closed, **parameters, "type": "object"}


def _arguments(syntax: Syntax, end: str, index: int, parameters: dict[str, Any]) -> Iterator[str]:
    """Each in its own form, in the order of the schema."""
    assert syntax.argument is not None
    for word in (*_COMPOSED, "minProperties", "maxProperties", "dependentRequired", "propertyNames"):
        if word in parameters:
            raise ValueError(f"{word} at the top of the parameters cannot be enforced for this model; leave it out")
    properties = properties_of(parameters)
    required = parameters.get("required") or ()
    if unknown := [key for key in required if key not in properties]:
        raise ValueError(f"{unknown[0]!r} is required and not among the properties")
    for which in ("rest", "more"):
        yield f'{which}_{index}_{len(properties)}: ""'
    yield f"args_{index}: rest_{index}_0"
    for place, (key, schema) in enumerate(properties.items()):
        if not re.fullmatch(syntax.names[1], key) or (keyword.iskeyword(key) and not syntax.argument[1]):
            raise ValueError(f"this model cannot write the name {key!r}")
        at, then = f"{index}_{place}", f"{index}_{place + 1}"
        yield f"arg_{at}: " + _sequence(literal(syntax.argument[0].replace("$key", key)), f"val_{at}")
        skipped = key not in required
        yield f"rest_{at}: arg_{at} more_{then}" + (f" | rest_{then}" if skipped else "")
        yield (
            f"more_{at}: "
            + _sequence(literal(syntax.comma), f"arg_{at}", f"more_{then}")
            + (f" | more_{then}" if skipped else "")
        )
        yield from _value(syntax, end, at, schema, parameters)


def _value(syntax: Syntax, end: str, at: str, schema: object, parameters: Mapping[str, Any]) -> Iterator[str]:
    """The value and what stands after it: a bare text ends where that begins, so the two are one terminal."""
    assert syntax.argument is not None
    admitted, after = kinds(schema, parameters), syntax.argument[1]
    if syntax.bare is not None and "string" in admitted:
        after = syntax.bare[1] + after
        forbidden = [word for word in (after.strip(), end, *syntax.forbidden) if word]
        texts = " | ".join(_bare(schema, parameters, forbidden))
        yield f"val_{at}: " + _sequence(literal(syntax.bare[0]), f"text_{at}")
        yield f"text_{at}[lazy]: BARE_{at} {literal(after)}"
        yield f"BARE_{at}: {texts}"
        return
    if syntax.scalars and admitted & {"array", "object"}:
        raise ValueError("this model's calls can hold texts, numbers, true and false alone, no lists or objects")
    definitions = {word: parameters[word] for word in ("$defs", "definitions") if word in parameters}
    value = _json({**definitions, **schema} if isinstance(schema, dict) else schema)
    yield f"val_{at}: " + _sequence(f"json_{at}", literal(after))
    yield f"json_{at}: {value}"


def _bare(schema: object, root: Mapping[str, Any], forbidden: Sequence[str], levels: int = 8) -> Iterator[str]:
    """Terminals for the texts that `schema` allows, written as they are."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or levels == 0:
        yield _terminal({}, forbidden)
        return
    if ways := schema.get("anyOf") or schema.get("oneOf"):
        for way in ways:
            if "string" in kinds(way, root):
                yield from _bare(way, root, forbidden, levels - 1)
        return
    if beyond := sorted(schema.keys() - _SAID_OF_TEXT - _SAYS_NOTHING):
        raise ValueError(f"{beyond[0]} of a text cannot be enforced for this model; leave it out")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None:
        yield _terminal(schema, forbidden)
        return
    for value in values:
        if isinstance(value, str):
            if value != value.strip() or value.lower() == "null" or any(word in value for word in forbidden):
                raise ValueError(f"this model cannot write the value {value!r} so that it is read back")
            yield literal(value) or '""'


def _terminal(schema: Mapping[str, Any], forbidden: Sequence[str]) -> str:
    limits = [_TEXT, _TRIMMED, _NOT_NULL, *(f"~/(?s:.*){_escaped(word)}(?s:.*)/" for word in forbidden)]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        limits.append(f"/(?s:.{{{least},{most}}})/")
    return " & ".join(limits)


def _escaped(text: str) -> str:
    return re.sub(r"([^\w\s<>\"])", r"\\\1", text)


def _json(schema: object) -> str:
    bounded = with_bounded_integers(schema)
    return "%json " + json.dumps({**bounded, "x-guidance": dict(COMPACT_JSON)} if isinstance(bounded, dict) else {})
