"""How a family writes calls, as data, and grammars of such calls in llguidance's Lark: calls that the family's parser
reads back, with valid arguments.

The rules, for tool 0 and its third argument:

    start     the whole text                body      the calls between a start mark and an end mark
    call_0    a call of tool 0              call      a call of any tool
    args_0    its arguments                 arg_0_2   an argument with its value, val_0_2
    rest_0_2  the arguments from the third  more_0_2  the same, after another argument
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.core.grammar import COMPACT_JSON
from mlx_parallm.core.schemas import enforceable_schema
from mlx_parallm.core.text import Tool, UnwritableToolError


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Pairs are (text before, text after). `$name` stands for a tool's name, `$key` for an argument's, and `$index` for
    a call's number.

    call:      around a call's arguments
    argument:  around the value of each argument; None: the arguments are one JSON object
    comma:     between arguments
    bare:      around a value whose schema allows a string; such a value is written as it is, without quotes. None:
               every value is written as JSON
    plain:     before any other value, in families that say whether a value is JSON
    forbidden: texts that a bare value must not contain, besides the text that ends it
    scalars:   no value may be an array or an object
    names:     regular expressions for the names of tools and of arguments that the parser reads back
    block:     around all calls between one start mark and one end mark
    between:   between two calls inside a block; None: each call has its own marks, with `join` between them
    lead:      before a call that must come; the prompt or a mark has it in any other case
    single:    one answer has one call
    native:    other forms that models of the family may write when nothing is enforced
    """

    call: tuple[str, str]
    argument: tuple[str, str] | None = None
    comma: str = ""
    bare: tuple[str, str] | None = None
    plain: str = ""
    forbidden: tuple[str, ...] = ()
    scalars: bool = False
    names: tuple[str, str] = (r"[\w-]+", r"[^\s<>\"'=]+")
    block: tuple[str, str] = ("", "")
    between: str | None = None
    join: str = "\n"
    lead: str = ""
    single: bool = False
    native: tuple[CallSyntax, ...] = ()

    @property
    def prefix(self) -> str:
        """The text before the name of a tool."""
        return self.call[0].partition("$name")[0]

    @property
    def all_marks(self) -> str:
        """All fixed texts, joined."""
        fixed = [*self.call, *self.block, *(self.argument or ()), *(self.bare or ()), self.between or "", self.lead]
        return "".join([*fixed, *(form.all_marks for form in self.native)])


_TEXT = r"/[^\x00-\x08\x0b-\x1f\x7f]*/"
_TRIMMED = r"/([^\s\x00-\x1f\x7f]((?s:.*)[^\s\x00-\x1f\x7f])?)?/"
_NOT_NULL = "~/[nN][uU][lL][lL]/"
"""Parsers strip white space from bare texts, and read the word null as JSON's null."""
_STRING_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "nullable"})
_COMPOSITION = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "not", "if")
_MAX_DEPTH = 8
"""Nested references and alternatives that are followed. A schema that is nested deeper counts as any value."""
_ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_TYPE_NAMES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}


def call_grammar(
    syntax: CallSyntax, starts: Sequence[str], end: str, tools: Sequence[Tool], most: int, free: bool
) -> str:
    """Lark source for texts of 1 to `most` calls and nothing else; with `free`, for any text with valid calls. `starts`
    and `end` are the marks; only the first start mark may be written.

    Raises:
        UnwritableToolError: a tool's arguments cannot be written unambiguously.
    """
    most = 1 if syntax.single else most
    calls = "call" if syntax.between is None else _repeated("call", syntax.between, most)
    body = _sequence(_literal(syntax.block[0]), calls, _literal(syntax.block[1] + end))
    lines = ["%llguidance {}", *_start_rules(syntax, starts, most, free), f"body: {body}"]
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        try:
            lines += _call_rules(syntax, end, index, tool)
        except ValueError as error:
            raise UnwritableToolError(index, str(error)) from None
    return "\n".join([*lines, "INDEX: /[0-9]|[1-9][0-9]/", ""])


def _literal(text: str) -> str:
    """The Lark string for this text; nothing for an empty text."""
    return json.dumps(text) if text else ""


def _start_rules(syntax: CallSyntax, starts: Sequence[str], most: int, free: bool) -> Iterator[str]:
    start, *others = starts
    if free:
        yield "start: " + ("(head body)* TEXT" if most > 1 else "TEXT | head body")
        yield f"head[lazy]: TEXT {_literal(start)}"
        yield "TEXT: " + " & ".join(["/(?s:.*)/", *(_without(other) for other in others if not other.endswith(start))])
    else:
        yield "start: " + (_repeated("marked", syntax.join, most) if syntax.between is None else "marked")
        yield f"marked: {_literal(syntax.lead + start)} body"


def _repeated(rule: str, between: str, most: int) -> str:
    return f"{rule} ({_literal(between)} {rule}){{0,{most - 1}}}" if most > 1 else rule


def _sequence(*parts: str) -> str:
    """The parts that are not empty, in order; if all are empty, the empty string."""
    return " ".join(filter(None, parts)) or '""'


def _call_rules(syntax: CallSyntax, end: str, index: int, tool: Tool) -> Iterator[str]:
    name = tool["function"]["name"]
    if not re.fullmatch(syntax.names[0], name):
        raise ValueError(f"this model cannot write the name {name!r}")
    before, after = (part.replace("$name", name) for part in syntax.call)
    yield f"call_{index}: " + _sequence(_numbered(before), f"args_{index}", _literal(after))
    parameters = _closed_object(parameters_of(tool))
    if syntax.argument is None:
        yield f"args_{index}: {_json(parameters)}"
    else:
        yield from _argument_rules(syntax, end, index, parameters)


def _numbered(text: str) -> str:
    return " INDEX ".join(map(_literal, text.split("$index")))


def _closed_object(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of the arguments as one JSON object, without unknown arguments unless the schema allows them."""
    if parameters.get("type", "object") != "object":
        raise ValueError('the parameters of a function are an object: their type must be "object"')
    closed = {} if any(word in parameters for word in _COMPOSITION) else {"additionalProperties": False}
    return {**closed, **parameters, "type": "object"}


def _argument_rules(syntax: CallSyntax, end: str, index: int, parameters: dict[str, Any]) -> Iterator[str]:
    """For families that write each argument separately: the arguments in the order of the schema."""
    assert syntax.argument is not None
    for word in (*_COMPOSITION, "minProperties", "maxProperties", "dependentRequired", "propertyNames"):
        if word in parameters:
            raise ValueError(f"{word} at the top of the parameters cannot be enforced for this model; leave it out")
    properties = properties_of(parameters)
    required = parameters.get("required") or ()
    if unknown := [key for key in required if key not in properties]:
        raise ValueError(f"{unknown[0]!r} is required and not among the properties")
    for which in ("rest", "more"):
        yield f'{which}_{index}_{len(properties)}: ""'
    yield f"args_{index}: rest_{index}_0"
    for position, (key, schema) in enumerate(properties.items()):
        if not re.fullmatch(syntax.names[1], key) or (keyword.iskeyword(key) and not syntax.argument[1]):
            raise ValueError(f"this model cannot write the name {key!r}")
        at, after = f"{index}_{position}", f"{index}_{position + 1}"
        yield f"arg_{at}: " + _sequence(_literal(syntax.argument[0].replace("$key", key)), f"val_{at}")
        optional = key not in required
        yield f"rest_{at}: arg_{at} more_{after}" + (f" | rest_{after}" if optional else "")
        yield (
            f"more_{at}: "
            + _sequence(_literal(syntax.comma), f"arg_{at}", f"more_{after}")
            + (f" | more_{after}" if optional else "")
        )
        yield from _value_rules(syntax, end, at, schema, parameters)


def _value_rules(syntax: CallSyntax, end: str, at: str, schema: object, parameters: Mapping[str, Any]) -> Iterator[str]:
    """A value and the text after it. They are one terminal, because a bare text ends where the text after it begins."""
    assert syntax.argument is not None
    types, after = value_types(schema, parameters), syntax.argument[1]
    if syntax.bare is not None and "string" in types:
        after = syntax.bare[1] + after
        forbidden = [word for word in (after.strip(), end, *syntax.forbidden) if word]
        texts = " | ".join(_bare_terminals(schema, parameters, forbidden))
        yield f"val_{at}: " + _sequence(_literal(syntax.bare[0]), f"text_{at}")
        yield f"text_{at}[lazy]: BARE_{at} {_literal(after)}"
        yield f"BARE_{at}: {texts}"
        return
    if syntax.scalars and types & {"array", "object"}:
        raise ValueError("this model's calls can hold texts, numbers, true and false alone, no lists or objects")
    definitions = {word: parameters[word] for word in ("$defs", "definitions") if word in parameters}
    value = _json({**definitions, **schema} if isinstance(schema, dict) else schema)
    yield f"val_{at}: " + _sequence(_literal(syntax.plain), f"json_{at}", _literal(after))
    yield f"json_{at}: {value}"


def _bare_terminals(
    schema: object, root: Mapping[str, Any], forbidden: Sequence[str], levels: int = _MAX_DEPTH
) -> Iterator[str]:
    """Terminals for the strings that `schema` allows, without quotes."""
    schema = _resolve(schema, root)
    if not isinstance(schema, dict) or levels == 0:
        yield _terminal({}, forbidden)
        return
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        for alternative in alternatives:
            if "string" in value_types(alternative, root):
                yield from _bare_terminals(alternative, root, forbidden, levels - 1)
        return
    if unsupported := sorted(schema.keys() - _STRING_KEYWORDS - _ANNOTATIONS):
        raise ValueError(f"{unsupported[0]} of a text cannot be enforced for this model; leave it out")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None:
        yield _terminal(schema, forbidden)
        return
    for value in values:
        if isinstance(value, str):
            if value != value.strip() or value.lower() == "null" or any(word in value for word in forbidden):
                raise ValueError(f"this model cannot write the value {value!r} so that it is read back")
            yield _literal(value) or '""'


def _terminal(schema: Mapping[str, Any], forbidden: Sequence[str]) -> str:
    parts = [_TEXT, _TRIMMED, _NOT_NULL, *map(_without, forbidden)]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    return " & ".join(parts)


def _without(word: str) -> str:
    """The texts that do not contain a word."""
    escaped = re.sub(r"([^\w\s<>\"\x80-\U0010ffff])", r"\\\1", word)
    return f"~/(?s:.*){escaped}(?s:.*)/"


def _json(schema: object) -> str:
    bounded = enforceable_schema(schema)
    return "%json " + json.dumps({**bounded, "x-guidance": dict(COMPACT_JSON)} if isinstance(bounded, dict) else {})


# -- reading the schemas of tools ----------------------------------------------------------------


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments. A tool without one takes no arguments."""
    parameters = tool["function"].get("parameters")
    return parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}


def properties_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def value_types(schema: object, root: Mapping[str, Any], levels: int = _MAX_DEPTH) -> frozenset[str]:
    """The JSON types that `schema` allows, or a superset of them. `$ref`s are looked up in `root`."""
    schema = _resolve(schema, root)
    if not isinstance(schema, dict) or levels == 0:
        return _ALL_TYPES
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_type_of, values))
    if isinstance(types := schema.get("type"), str | list):
        return frozenset([types] if isinstance(types, str) else map(str, types))
    if isinstance(alternatives := schema.get("anyOf") or schema.get("oneOf"), list):
        return frozenset().union(*(value_types(one, root, levels - 1) for one in alternatives))
    return _ALL_TYPES


def _resolve(schema: object, root: Mapping[str, Any]) -> object:
    """Follows a local `$ref`. A reference that leads nowhere, and any other schema, is returned unchanged."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        target: object = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        if target is None:
            break
        schema = target
    return schema


def _type_of(value: object) -> str:
    return _TYPE_NAMES.get(type(value), "null")
