"""The tool-call format of a model: parses calls, complete or cut off, writes them, and enforces their form.

How each family writes calls is data in `syntax`. `reading` follows it, and `grammar` makes the grammar that forces
well-formed calls. Where mlx-lm has a parser for the family, that one reads the calls that are whole.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.core import CallReader, JsonPosition, RepairedCalls, Tool, ToolCall, UnwritableToolError
from mlx_parallm.model.tools.grammar import call_grammar, parameters_of, properties_of, value_types
from mlx_parallm.model.tools.reading import EnforcedCalls, cut_off_calls, whole_calls, written
from mlx_parallm.model.tools.repair import may_begin_call, plain_json, repaired_calls
from mlx_parallm.model.tools.syntax import FAMILIES, JSON, OTHER_NAMES, CallSyntax, Family, named

Parser = Callable[[str, Any], Any]
"""A parser of mlx-lm: (text between the marks, tools) → one call or a list of calls."""


@dataclass(frozen=True, slots=True)
class FamilyToolFormat:
    """Implements `core.ToolFormat` for one family. `parser`: mlx-lm's; None: calls are read by the syntax."""

    family: Family
    parser: Parser | None = None
    in_template: bool = True
    visible_specials: frozenset[int] = frozenset()

    @property
    def starts(self) -> tuple[str, ...]:
        return self.family.starts

    @property
    def start(self) -> str:
        return self.family.starts[0]

    @property
    def end(self) -> str:
        return self.family.end

    @property
    def around(self) -> tuple[str, ...]:
        return self.family.around

    @property
    def syntax(self) -> CallSyntax | None:
        return self.family.syntax

    def inside_value(self, position: JsonPosition) -> bool:
        """See `core.ToolFormat.inside_value`. Calls written as JSON: true while a string is open, and, if a bracket
        ends them, while another bracket is."""
        if self.syntax is None or self.syntax.argument is not None:
            return False
        return position.in_string or (self.end in ("}", "]") and position.depth > 0)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """See `core.ToolFormat.parse`. A call of a tool that is not in `tools` is malformed too."""
        calls = tuple(_tool_call(call) for call in self._parsed(text, tools))
        known = {tool["function"]["name"] for tool in tools}
        if not calls or any(call.name not in known for call in calls):
            raise ValueError("it calls an unknown tool")
        return calls

    def _parsed(self, text: str, tools: Sequence[Tool]) -> Sequence[Any]:
        if self.parser is None:
            assert self.syntax is not None, "calls of a family without a syntax are read by a parser"
            return whole_calls(self.syntax, text)
        try:
            parsed = self.parser(text, [_parser_tool(tool) for tool in tools])
        except Exception as error:  # the parser reads whatever the model wrote, and may fail in any way
            raise ValueError("no call can be read") from error
        return parsed if isinstance(parsed, list) else [parsed]

    def may_begin_call(self, text: str, tools: Sequence[Tool]) -> bool:
        """See `core.ToolFormat.may_begin_call`."""
        return may_begin_call(text, frozenset(tool["function"]["name"] for tool in tools), _all_formats())

    def repaired(self, text: str, tools: Sequence[Tool]) -> RepairedCalls | None:
        """See `core.ToolFormat.repaired`."""
        return repaired_calls(text, tools, _all_formats())

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """See `core.ToolFormat.written`."""
        assert self.syntax is not None, "calls of a family without a syntax are written by its template"
        return written(self.syntax, (self.start, self.end), calls)

    def unfinished(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """See `core.ToolFormat.unfinished`."""
        if self.syntax is None:
            return self.parse(text, tools)
        names = frozenset(tool["function"]["name"] for tool in tools)
        return cut_off_calls(self.syntax, lambda part: self.parse(part, tools), text, names)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """See `core.ToolFormat.reader`."""
        assert self.syntax is not None, "calls of a family without a syntax are never enforced"
        return EnforcedCalls(self.syntax, self.end, tools, lambda call: self.parse(call, tools))

    def grammar(self, tools: Sequence[Tool], most: int, free: bool) -> str:
        """See `core.ToolFormat.grammar`."""
        if self.syntax is None:
            raise UnwritableToolError(0, "calls of this model's family cannot be enforced")
        return call_grammar(self.syntax, self.starts, self.end, tools, most, free)


def family_format(family: Family) -> FamilyToolFormat:
    """The format of a family, with mlx-lm's parser and its marks if the family has one."""
    if not family.parser:
        return FamilyToolFormat(family)
    module = importlib.import_module(f"mlx_lm.tool_parsers.{family.parser}")
    marked = replace(family, starts=(module.tool_call_start,), end=module.tool_call_end)
    return FamilyToolFormat(marked, module.parse_tool_call)


@cache
def _all_formats() -> tuple[FamilyToolFormat, ...]:
    """Every family's format, and JSON with other names of fields between the marks of each and without marks."""
    formats = [family_format(family) for family in FAMILIES.values()]
    marks = {((start,), each.end) for each in formats for start in each.starts if not start.endswith(("[", ":", "."))}
    around = [Family(JSON, starts=starts, end=end) for starts, end in sorted(marks)]
    return (*formats, *(FamilyToolFormat(family, plain_json) for family in around))


HERMES = replace(family_format(FAMILIES["json_tools"]), in_template=False)
"""For models of no known family. The messages tell such a model to write calls as Hermes models do."""


def tool_format_of(wrapped: TokenizerWrapper, template: str, name: str | None = None) -> FamilyToolFormat:
    """The format of a model: that of this name, mlx-lm's, or the one that its chat template or its vocabulary tells of.

    Raises:
        ConfigError: there is no format of this name.
    """
    if name is not None:
        chosen = family_format(named(FAMILIES, OTHER_NAMES, name, "model.tool_parser"))
        return replace(chosen, in_template=not template or "tools" in template)
    if wrapped.tool_parser is not None:
        parser = wrapped.tool_parser.__module__.rpartition(".")[2]
        known = "mistral_list" if parser == "mistral" and "[ARGS]" not in template else parser
        if known in FAMILIES:
            return family_format(FAMILIES[known])
        unknown = Family(None, starts=(wrapped.tool_call_start,), end=wrapped.tool_call_end)
        return FamilyToolFormat(unknown, wrapped.tool_parser)
    vocabulary = wrapped.get_vocab()
    for family in FAMILIES.values():
        in_template = family.template and all(text in template for text in family.template)
        if in_template or (family.token and family.token in vocabulary):
            return family_format(family)
    return HERMES


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
    if "arguments" not in parsed and not parsed.keys() <= {"name", "id"}:
        raise ValueError("its arguments have another name")
    name, arguments, call_id = parsed.get("name"), parsed.get("arguments", {}), parsed.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and its arguments are an object")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:  # some parsers read Python's literals, such as sets
        raise ValueError("its arguments are not JSON") from error
    # Half of a surrogate pair is valid JSON but cannot be sent as UTF-8.
    return ToolCall(name, text.encode("utf-8", "replace").decode(), call_id if isinstance(call_id, str) else None)
