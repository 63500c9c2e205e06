"""The tool-call format of a model: parses calls, complete or cut off, writes them, and enforces their form.

How each family writes calls is data: the table `FAMILIES`. `reading` follows it, and `grammar` makes the grammar that
forces well-formed calls. Where mlx-lm has a parser for the family, that one reads the calls that are whole, unless it
takes the square of a text's length. Adding a family: add an entry to `FAMILIES`, a text of it to
`tests/tool_families.py`, and a row to the table in docs/tools.md. Its thinking is an entry in `thinking`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.core.text import JsonPosition, RepairedCalls, Tool, ToolCall, UnwritableToolError
from mlx_parallm.model.tools.grammar import CallSyntax, call_grammar, parameters_of, properties_of, value_types
from mlx_parallm.model.tools.reading import EnforcedCalls, cut_off_calls, is_left_open, whole_calls, written
from mlx_parallm.model.tools.repair import Openings, plain_json, repaired_calls
from mlx_parallm.model.tools.thinking import named


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls. Safe to use from any thread.

    syntax:         how calls are written; None: unknown, they can be read by mlx-lm's parser but not enforced
    parser:         mlx-lm's, which reads whole calls: (text between the marks, tools) → one call or a list of calls.
                    None: `syntax` reads them
    starts, end:    the marks; of several start marks, grammars write the first. No mark may begin with another one.
                    Without an end mark, calls extend to the end of the text
    around:         marks that are removed from the text, because they belong to calls
    template:       texts that are in the chat templates of the family and in no other's
    token:          a token that is in the vocabularies of the family and in no other's
    stops:          tokens that end an answer
    text_arguments: the template takes arguments as JSON text
    in_content:     the template does not write calls, or not all: the content of a message must have them
    as_written:     a regular expression for what the template writes in another way, and what the model writes
    system_tools:   the template writes tools with a system message only; some take them as JSON text in a field of it
    in_template:    the chat template describes tools, calls and results to the model. If not, the messages must
    visible_specials: ids of the special tokens that calls are written with
    readable:       a regular expression for the beginning of a text that the parser may read. Some take the square of
                    the length of other texts, because they look for a call or a key at each character of a word
    """

    syntax: CallSyntax | None
    parser: Callable[[str, Any], Any] | None = None
    starts: tuple[str, ...] = ()
    end: str = ""
    around: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    token: str = ""
    stops: tuple[str, ...] = ()
    text_arguments: bool = False
    in_content: bool = False
    as_written: tuple[str, str] | None = None
    system_tools: bool = False
    in_template: bool = True
    visible_specials: frozenset[int] = frozenset()
    readable: str = ""

    @property
    def all_marks(self) -> str:
        """All fixed texts, joined."""
        return "".join([*self.starts, self.end, *self.around, self.syntax.all_marks if self.syntax else ""])

    def inside_value(self, position: JsonPosition) -> bool:
        """Whether a text that follows the start mark ends inside a value, so that an end mark there is part of the
        value. Calls written as JSON: true while a string is open, and, if a bracket ends them, while another bracket
        is.

        Args:
            position: where the text ends, if calls are JSON.
        """
        if self.syntax is None or self.syntax.argument is not None:
            return False
        return position.in_string or (self.end in ("}", "]") and position.depth > 0)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """The calls in a text between two marks, at least one.

        Raises:
            ValueError: there is no call, or it is malformed, or calls a tool that is not in `tools`.
        """
        if self.syntax is not None and is_left_open(self.syntax, text):
            raise ValueError("the call is not closed")
        if not re.match(self.readable, text):
            raise ValueError("it is not written like a call")
        if self.parser is None:
            assert self.syntax is not None, "calls of a family without a syntax are read by a parser"
            parsed: Any = whole_calls(self.syntax, text)
        else:
            try:
                parsed = self.parser(text, [_parser_tool(tool) for tool in tools])
            except Exception as error:  # the parser reads whatever the model wrote, and may fail in any way
                raise ValueError("no call can be read") from error
        try:
            calls = tuple(_tool_call(call) for call in (parsed if isinstance(parsed, list) else [parsed]))
        except RecursionError as error:
            raise ValueError("its arguments are nested too deeply") from error
        known = {tool["function"]["name"] for tool in tools}
        if not calls or any(call.name not in known for call in calls):
            raise ValueError("it calls an unknown tool")
        return calls

    def unfinished(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """The calls in a text that was cut off after a start mark.

        Only the last call may be incomplete. It is left out while its name is incomplete.

        Raises:
            ValueError: the text is not the beginning of a call.
        """
        if self.syntax is None:
            return self.parse(text, tools)
        names = frozenset(tool["function"]["name"] for tool in tools)
        return cut_off_calls(self.syntax, lambda part: self.parse(part, tools), text, names)

    def may_begin_call(self, text: str, tools: Sequence[Tool], at: int = 0) -> bool:
        """Whether a text that begins with `text` from `at` on, at the beginning of a line, may be a call for
        `repaired`. False stays false when more text comes."""
        return _openings(frozenset(tool["function"]["name"] for tool in tools)).may_begin(text, at)

    def repaired(self, text: str, tools: Sequence[Tool]) -> RepairedCalls | None:
        """The calls of a text that is not valid in the family's form, if it can only mean these calls, and nothing
        else is in it."""
        with suppress(RecursionError):  # arguments that are nested too deeply are no call
            return repaired_calls(text, tools, _all_formats())
        return None

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """The text of calls, each with a name and arguments, as the model writes them."""
        assert self.syntax is not None, "calls of a family without a syntax are written by its template"
        return written(self.syntax, (self.starts[0], self.end), calls)

    def reader(self, tools: Sequence[Tool]) -> EnforcedCalls:
        """Reads one text after a start mark that follows the `grammar` of these tools."""
        assert self.syntax is not None, "calls of a family without a syntax are never enforced"
        return EnforcedCalls(self.syntax, self.end, tools, lambda call: self.parse(call, tools))

    def grammar(self, tools: Sequence[Tool], most: int, free: bool) -> str:
        """Lark source for texts of 1 to `most` calls and nothing else; with `free`, for any text with valid calls.

        Raises:
            UnwritableToolError: the family cannot write a tool's arguments unambiguously.
        """
        if self.syntax is None:
            raise UnwritableToolError(0, "calls of this model's family cannot be enforced")
        return call_grammar(self.syntax, self.starts, self.end, tools, most, free)


# -- how each family writes calls ---------------------------------------------------------------

JSON = CallSyntax(call=('\n{"name": "$name", "arguments": ', "}\n"))
MISTRAL_LIST = CallSyntax(call=('{"name": "$name", "arguments": ', "}"), block=("[", "]"), between=", ")
_LONGCAT = CallSyntax(
    call=("$name\n", ""),
    argument=("<longcat_arg_key>$key</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
)
_KIMI_K3 = CallSyntax(
    call=('<|open|>call tool="$name" index="$index"<|sep|>', "<|close|>call<|sep|>"),
    argument=('<|open|>argument key="$key" type="string"<|sep|>', "<|close|>argument<|sep|>"),
    between="",
)
_IDENTIFIER = r"(?!\d)\w+"

_READ_BY_MLX_LM: Mapping[str, CallSyntax] = {
    "json_tools": JSON,
    "longcat": replace(
        JSON, native=(_LONGCAT,)
    ),  # its parser reads both forms; the native one cannot write a call without arguments
    "kimi_k2": CallSyntax(
        call=("<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>", "<|tool_call_end|>"), between=""
    ),
    "kimi_k3": CallSyntax(
        call=(
            '<|open|>call tool="$name" index="$index"<|sep|><|open|>json type="object"<|sep|>',
            "<|close|>json<|sep|><|close|>call<|sep|>",
        ),
        between="",
        native=(_KIMI_K3,),
    ),
    "qwen3_coder": CallSyntax(
        call=("\n<function=$name>\n", "</function>\n"),
        argument=("<parameter=$key>\n", "\n</parameter>\n"),
        bare=("", ""),
    ),
    "glm47": CallSyntax(
        call=("$name\n", ""),
        argument=("<arg_key>$key</arg_key>\n<arg_value>", "</arg_value>\n"),
        bare=("", ""),
    ),
    "minimax_m2": CallSyntax(
        call=('\n<invoke name="$name">\n', "</invoke>"),
        argument=('<parameter name="$key">', "</parameter>\n"),
        bare=("", ""),
        block=("", "\n"),
        between="",
    ),
    "minicpm5": CallSyntax(call=('"$name">', ""), argument=('<param name="$key">', "</param>"), bare=("", ""), join=""),
    "muse_spark": CallSyntax(
        call=('\n<atem:invoke name="$name">', "\n</atem:invoke>"),
        argument=('\n<atem:parameter name="$key">', "</atem:parameter>"),
        block=("", "\n"),
        between="",
    ),
    "pythonic": CallSyntax(
        call=("$name(", ")"),
        argument=("$key=", ""),
        comma=", ",
        names=(_IDENTIFIER, _IDENTIFIER),
        block=("[", "]"),
        between=", ",
    ),
    "gemma4": CallSyntax(
        call=("call:$name{", "}"),
        argument=("$key:", ""),
        comma=",",
        bare=('<|"|>', '<|"|>'),
        scalars=True,
        names=(r"[\w-]+", r"\w+"),
        join="",
    ),
    "function_gemma": CallSyntax(
        call=("call:$name{", "}"),
        argument=("$key:", ""),
        comma=",",
        bare=("<escape>", "<escape>"),
        forbidden=("}",),
        scalars=True,
        names=(r"\w+", r"\w+"),
        join="",
    ),
}

_READABLE = {
    "minicpm5": r"""(?s)\s*(?:<function\s+)?(?:name\s*=\s*)?(?:"[^"]*"|'[^']*'|[^\s"'<>]+)\s*>(?!.*</function>)""",
    "kimi_k3": r"(?s)(?:(?!<\|open\|>).|<\|open\|>(?:(?!<\|(?:sep|open)\|>).){0,500}<\|sep\|>)*+\Z",
    "pythonic": r"(?:\W*+\w{1,2000}+(?!\w))*+\W*\Z",
}
"""`ToolFormat.readable`, by the name of the parser."""

# -- families that mlx-lm has no parser for, or one that takes the square of a text's length -------

_LIST = CallSyntax(call=('{"name": "$name", "arguments": ', "}"), between=", ")
_COMMAND = CallSyntax(call=('{"tool_name": "$name", "parameters": ', "}"), block=("[\n    ", "\n]"), between=",\n    ")
_DSML = CallSyntax(
    call=('\n<｜DSML｜invoke name="$name">\n', "</｜DSML｜invoke>"),
    argument=('<｜DSML｜parameter name="$key" string="', "</｜DSML｜parameter>\n"),
    bare=('true">', ""),
    plain='false">',
    block=("", "\n"),
    between="",
)
_HARMONY_HEADINGS = tuple(
    CallSyntax(call=(f"$name{channel}{kind}<|message|>", ""))
    for channel in ("", "<|channel|>commentary", "<|channel|>analysis")
    for kind in (" <|constrain|>json", " json", " code", "")
)


def _in_mlx_lm(parser: str) -> bool:
    """Its releases rename parsers. A family without one is left out, so that everything else works."""
    return find_spec(f"mlx_lm.tool_parsers.{parser}") is not None


def _read_by_mlx_lm(parser: str, syntax: CallSyntax) -> ToolFormat:
    """A family with mlx-lm's parser of this name, which also gives the marks."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    marks = (module.tool_call_start,), module.tool_call_end
    return ToolFormat(syntax, module.parse_tool_call, *marks, readable=_READABLE.get(parser, ""))


FAMILIES: Mapping[str, ToolFormat] = {
    **{name: _read_by_mlx_lm(name, syntax) for name, syntax in _READ_BY_MLX_LM.items() if _in_mlx_lm(name)},
    "mistral": ToolFormat(CallSyntax(call=("$name[ARGS]", ""), between="[TOOL_CALLS]"), starts=("[TOOL_CALLS]",)),
    "mistral_list": ToolFormat(MISTRAL_LIST, plain_json, starts=("[TOOL_CALLS]",)),
    "openai": ToolFormat(
        replace(_HARMONY_HEADINGS[0], lead="<|start|>assistant", single=True, native=_HARMONY_HEADINGS[1:]),
        starts=("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.", "to=functions."),
        around=("<|start|>assistant",),
        template=("<|channel|>analysis<|message|>", "functions."),
        stops=("<|call|>", "<|return|>"),
        as_written=(
            r"(<\|start\|>assistant) to=(functions\.[\w.-]+)<\|channel\|>commentary json<\|message\|>",
            r"\1<|channel|>commentary to=\2 <|constrain|>json<|message|>",
        ),
    ),
    "deepseek_v3": ToolFormat(
        CallSyntax(
            call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n", "\n```<｜tool▁call▁end｜>"),
            between="\n",
        ),
        starts=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        template=("<｜tool▁calls▁begin｜>", "```json"),
        in_content=True,
    ),
    "deepseek_v31": ToolFormat(
        CallSyntax(call=("<｜tool▁call▁begin｜>$name<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), between=""),
        starts=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        template=("<｜tool▁calls▁begin｜>",),
        text_arguments=True,
    ),
    "deepseek_v4": ToolFormat(
        _DSML,
        starts=("<｜DSML｜tool_calls>",),
        end="</｜DSML｜tool_calls>",
        template=("<｜DSML｜tool_calls>",),
    ),
    "deepseek_v32": ToolFormat(
        _DSML,
        starts=("<｜DSML｜function_calls>",),
        end="</｜DSML｜function_calls>",
        token="｜DSML｜",
        text_arguments=True,
        system_tools=True,
    ),
    "llama3_json": ToolFormat(
        CallSyntax(call=(' "$name", "parameters": ', ""), native=(CallSyntax(call=(' "$name", "arguments": ', "")),)),
        starts=('{"name":', '<|python_tag|>{"name":'),
        end="}",
        around=("<|python_start|>", "<|python_end|>"),
        template=("header_", '{"name": "', '"parameters": '),
    ),
    "granite": ToolFormat(
        _LIST,
        starts=("<|tool_call|>[", "<|tool_call|> [", "<tool_call>["),
        end="]",
        template=("<|start_of_role|>", "<|tool_call|>"),
        in_content=True,
    ),
    "granite-20b-fc": ToolFormat(
        CallSyntax(call=(' "$name", "arguments": ', ""), join=""),
        starts=('<function_call> {"name":', '<function_call>{"name":'),
        end="}",
        template=("<|function_call_library|>",),
    ),
    "phi4_mini_json": ToolFormat(
        _LIST,
        starts=("<|tool_call|>[", "functools["),
        end="]",
        around=("<|/tool_call|>",),
        template=("<|tool|>", "<|/tool|>"),
        in_content=True,
        system_tools=True,
    ),
    "cohere_command": ToolFormat(
        replace(
            _COMMAND,
            call=('{"tool_call_id": "$index", "tool_name": "$name", "parameters": ', "}"),
            native=(_COMMAND,),
        ),
        starts=("<|START_ACTION|>",),
        end="<|END_ACTION|>",
        template=("<|START_ACTION|>",),
    ),
    "command_r": ToolFormat(
        CallSyntax(
            call=('{\n        "tool_name": "$name",\n        "parameters": ', "\n    }"),
            block=("\n[\n    ", "\n]"),
            between=",\n    ",
        ),
        starts=("Action: ```json", "Action:```json"),
        end="```",
        template=("followed by a json-formatted list of actions",),
        in_content=True,
    ),
}
"""Keyed by the name of mlx-lm's parser, or vLLM's name of the format. Where several match, the first is meant."""

OTHER_NAMES: Mapping[str, str] = {
    "hermes": "json_tools",
    "granite4": "json_tools",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm47",
    "laguna": "glm47",
    "poolside_v1": "glm47",
    "functiongemma": "function_gemma",
    "lfm2": "pythonic",
    "minimax": "minimax_m2",
    "gpt_oss": "openai",
    "deepseek_r1": "deepseek_v3",
    "llama4_json": "llama3_json",
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
}
"""Names of vLLM and of models → keys of `FAMILIES`."""

# -- the format of a model -------------------------------------------------------------------------

HERMES = replace(FAMILIES["json_tools"], in_template=False)
"""For models of no known family. The messages tell such a model to write calls as Hermes models do."""


def tool_format_of(wrapped: TokenizerWrapper, template: str, name: str | None = None) -> ToolFormat:
    """The format of a model: that of this name, mlx-lm's, or the one that its chat template or its vocabulary tells of.

    Raises:
        ConfigError: there is no format of this name.
    """
    if name is not None:
        chosen = named(FAMILIES, OTHER_NAMES, name, "model.tool_parser")
        return replace(chosen, in_template=not template or "tools" in template)
    if wrapped.tool_parser is not None:
        parser = wrapped.tool_parser.__module__.rpartition(".")[2]
        known = "mistral_list" if parser == "mistral" and "[ARGS]" not in template else parser
        if known in FAMILIES:
            return FAMILIES[known]
        return ToolFormat(None, wrapped.tool_parser, (wrapped.tool_call_start,), wrapped.tool_call_end)
    vocabulary = wrapped.get_vocab()
    for family in FAMILIES.values():
        in_template = family.template and all(text in template for text in family.template)
        if in_template or (family.token and family.token in vocabulary):
            return family
    return HERMES


@cache
def _all_formats() -> tuple[ToolFormat, ...]:
    """Every family's format, and JSON with other names of fields between the marks of each and without marks."""
    formats = FAMILIES.values()
    marks = {((start,), each.end) for each in formats for start in each.starts if not start.endswith(("[", ":", "."))}
    return (*formats, *(ToolFormat(JSON, plain_json, starts, end) for starts, end in sorted(marks)))


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


@lru_cache(maxsize=64)
def _openings(names: frozenset[str]) -> Openings:
    return Openings(names, _all_formats())
