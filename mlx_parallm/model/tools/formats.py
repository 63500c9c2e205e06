"""The tool-call format of a model: parses calls, complete or cut off, with mlx-lm's parser, and enforces their form.

mlx-lm's parsers read calls only. How each family writes them is data in `syntax`; from that data `grammar` makes the
grammar that forces well-formed calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from mlx_parallm.core import CallReader, Tool, ToolCall, UnwritableToolError
from mlx_parallm.model.tools.grammar import call_grammar, parameters_of, properties_of, value_types
from mlx_parallm.model.tools.pieces import EnforcedCalls
from mlx_parallm.model.tools.syntax import JSON, MISTRAL_LIST, SYNTAXES, CallSyntax

Parser = Callable[[str, Any], Any]
"""A parser of mlx-lm: (text between the marks, tools) → one call or a list of calls."""

_QUOTE = re.compile(r'\\.|[^"\\]', re.DOTALL)
_DECODER = json.JSONDecoder()
_NAME = r"(?P<name>[\w.-]*)"
_MAX_TRIES = 8


@dataclass(frozen=True, slots=True)
class FamilyToolFormat:
    """Implements `core.ToolFormat` for one family. `syntax` None: calls can be read but not enforced."""

    start: str
    end: str
    in_template: bool
    visible_specials: frozenset[int]
    parser: Parser
    syntax: CallSyntax | None

    def inside_value(self, text: str) -> bool:
        """See `core.ToolFormat.inside_value`. True only in calls written as JSON, while a string is open."""
        return self.syntax is not None and self.syntax.argument is None and len(_QUOTE.sub("", text)) % 2 == 1

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """See `core.ToolFormat.parse`. A call of a tool that is not in `tools` is malformed too."""
        try:
            parsed = self.parser(text, [_parser_tool(tool) for tool in tools])
        except Exception as error:  # the parser reads whatever the model wrote, and may fail in any way
            raise ValueError("no call can be read") from error
        calls = tuple(_tool_call(call) for call in (parsed if isinstance(parsed, list) else [parsed]))
        known = {tool["function"]["name"] for tool in tools}
        if not calls or any(call.name not in known for call in calls):
            raise ValueError("it calls an unknown tool")
        return calls

    def unfinished(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """See `core.ToolFormat.unfinished`."""
        if self.syntax is None:
            return self.parse(text, tools)
        names = frozenset(tool["function"]["name"] for tool in tools)
        return _cut_off_calls(self.syntax, lambda part: self.parse(part, tools), text, names)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """See `core.ToolFormat.reader`."""
        assert self.syntax is not None, "calls of a family without a syntax are never enforced"
        return EnforcedCalls(self.syntax, self.end, tools, lambda call: self.parse(call, tools))

    def grammar(self, tools: Sequence[Tool], most: int, free: bool) -> str:
        """See `core.ToolFormat.grammar`."""
        if self.syntax is None:
            raise UnwritableToolError(0, "calls of this model's family cannot be enforced")
        return call_grammar(self.syntax, (self.start, self.end), tools, most, free)


HERMES = FamilyToolFormat(
    json_tools.tool_call_start, json_tools.tool_call_end, False, frozenset(), json_tools.parse_tool_call, JSON
)
"""For models without a parser in mlx-lm. The messages tell such a model to write calls as Hermes models do."""


def tool_format_of(
    wrapped: TokenizerWrapper, template: str | None, special_ids_in: Callable[[str], frozenset[int]]
) -> FamilyToolFormat:
    """The format of a model.

    Args:
        template: its default chat template.
        special_ids_in: returns the special tokens whose text is part of the given marks.
    """
    if wrapped.tool_parser is None:
        return HERMES
    parser, start, end = wrapped.tool_parser, wrapped.tool_call_start, wrapped.tool_call_end
    syntax = syntax_of(parser, template or "")
    visible_specials = special_ids_in(start + end + (syntax.all_marks if syntax else ""))
    return FamilyToolFormat(start, end, True, visible_specials, parser, syntax)


def syntax_of(parser: Parser, template: str) -> CallSyntax | None:
    name = parser.__module__.rpartition(".")[2]
    if name == "mistral" and "[ARGS]" not in template:
        return MISTRAL_LIST
    return SYNTAXES.get(name)


def _parser_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool as mlx-lm's parsers understand it: each argument is a string if it may be one, and JSON otherwise."""
    parameters = parameters_of(tool)
    properties = {
        key: {"type": "string" if "string" in value_types(schema, parameters) else "object"}
        for key, schema in properties_of(parameters).items()
    }
    function = {"name": tool["function"]["name"], "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def _tool_call(parsed: Any) -> ToolCall:
    """Raises ValueError: it is no call."""
    if not isinstance(parsed, dict):
        raise ValueError("a call is an object")
    name, arguments, call_id = parsed.get("name"), parsed.get("arguments", {}), parsed.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and its arguments are an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair is valid JSON but cannot be sent as UTF-8.
    return ToolCall(name, text.encode("utf-8", "replace").decode(), call_id if isinstance(call_id, str) else None)


# -- calls whose text was cut off ----------------------------------------------------------------
#
# A call is recognised by its prefix, the text before the name of the tool. White space is ignored in the comparison.

Parse = Callable[[str], Sequence[ToolCall]]
"""Parses text between marks. Raises ValueError: it is not a call of a known tool."""


def _cut_off_calls(syntax: CallSyntax, parse: Parse, text: str, names: frozenset[str]) -> tuple[ToolCall, ...]:
    """The calls of `text`, which follows a start mark and has no end mark. Empty: the first name is incomplete.

    Only the last call may be incomplete; its `arguments` are then the beginning of a JSON text.

    Args:
        names: the tools that may be called.

    Raises:
        ValueError: no call begins like this.
    """
    for form in sorted((syntax, *syntax.native), key=lambda form: not _has_argument(form, text)):
        try:
            if form.argument is None:
                return tuple(_json_calls(form, text, names))
            return tuple(_calls_by_argument(form, parse, text, names))
        except ValueError:
            continue
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
    """Calls of a family that writes each argument separately."""
    complete, end = _complete_calls(syntax, parse, text)
    yield from complete
    match = _match_next(syntax, text, end, names) if complete else _match_first(syntax, text, names)
    if match is not None:
        rest = syntax.block[0] + syntax.prefix + text[match.start("name") :]
        yield ToolCall(match.group("name"), _partial_arguments(syntax, parse, rest), complete=False)


def _complete_calls(syntax: CallSyntax, parse: Parse, text: str) -> tuple[Sequence[ToolCall], int]:
    """The calls that were closed, and the index where the last of them ends."""
    closing = syntax.call[1].strip()
    if not closing or closing not in text:
        return (), 0
    end = text.rindex(closing) + len(closing)
    try:
        return parse(text[:end] + syntax.block[1]), end
    except ValueError:
        return (), 0


def _match_first(syntax: CallSyntax, text: str, names: frozenset[str]) -> re.Match[str] | None:
    """The prefix and name at the beginning of `text`; None while they are incomplete. Raises ValueError: no call."""
    prefix = syntax.block[0] + syntax.prefix
    match = re.match(r"\s*" + _prefix_pattern(prefix), text)
    if match is None:
        if not _without_spaces(prefix).startswith(_without_spaces(text)):
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
    match = re.compile(_prefix_pattern(syntax.between + syntax.prefix)).search(text, start)
    return match if match is not None and match.end() < len(text) and match.group("name") in names else None


def _prefix_pattern(prefix: str) -> str:
    """A regular expression for a prefix and a name, with optional white space after each character of the prefix."""
    return "".join(re.escape(char) + r"\s*" for char in _without_spaces(prefix)) + _NAME


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _partial_arguments(syntax: CallSyntax, parse: Parse, text: str) -> str:
    """The beginning of the JSON text of the last call's arguments, up to the last argument that was closed."""
    for closed in islice(_closed_parts(syntax, text), _MAX_TRIES):
        try:
            arguments = parse(closed + syntax.call[1] + syntax.block[1])[-1].arguments
        except ValueError:
            continue
        return arguments.removesuffix("}") if arguments != "{}" else ""
    return ""


def _closed_parts(syntax: CallSyntax, text: str) -> Iterator[str]:
    """`text` up to the end of each argument, the longest first. If the same quote opens and closes values, only parts
    with an even number of quotes are returned."""
    assert syntax.argument is not None
    opening, closing = syntax.bare or ("", "")
    mark = (closing + syntax.argument[1]).strip()
    end = len(text)
    while (at := text.rfind(mark or syntax.comma.strip(), 0, end)) >= 0:
        closed, end = text[: at + len(mark)], at
        if not opening or opening != closing or closed.count(closing) % 2 == 0:
            yield closed
