"""How each family of models writes tool calls and marks its thinking, as data.

The parsers, the grammars and the text of earlier calls all follow from it. Adding a family: add an entry to `FAMILIES`,
a text of it to `tests/tool_families.py`, and a row to the table in docs/tools.md. Its thinking is an entry in
`REASONINGS`, with the marks that tell it from others.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.core import Reasoning
from mlx_parallm.errors import ConfigError


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


@dataclass(frozen=True, slots=True)
class Family:
    """A family's calls, with the marks around them.

    syntax:         how calls are written; None: unknown, they can be read by mlx-lm's parser but not enforced
    parser:         name of mlx-lm's parser, which reads whole calls and gives the marks; empty: `syntax` reads them
    starts, end:    the marks; of several start marks, grammars write the first. No mark may begin with another one
    around:         marks that are removed from the text, because they belong to calls
    template:       texts that are in the chat templates of the family and in no other's
    token:          a token that is in the vocabularies of the family and in no other's
    stops:          tokens that end an answer
    text_arguments: the template takes arguments as JSON text
    in_content:     the template does not write calls, or not all: the content of a message must have them
    as_written:     a regular expression for what the template writes in another way, and what the model writes
    system_tools:   the template writes tools with a system message only; some take them as JSON text in a field of it
    """

    syntax: CallSyntax | None
    parser: str = ""
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

    @property
    def all_marks(self) -> str:
        """All fixed texts, joined."""
        return "".join([*self.starts, self.end, *self.around, self.syntax.all_marks if self.syntax else ""])


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
    "mistral": CallSyntax(call=("$name[ARGS]", ""), between="[TOOL_CALLS]"),
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

# -- families that mlx-lm has no parser for -------------------------------------------------------

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

FAMILIES: Mapping[str, Family] = {
    **{name: Family(syntax, name) for name, syntax in _READ_BY_MLX_LM.items()},
    "mistral_list": Family(MISTRAL_LIST, "mistral"),
    "openai": Family(
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
    "deepseek_v3": Family(
        CallSyntax(
            call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n", "\n```<｜tool▁call▁end｜>"),
            between="\n",
        ),
        starts=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        template=("<｜tool▁calls▁begin｜>", "```json"),
        in_content=True,
    ),
    "deepseek_v31": Family(
        CallSyntax(call=("<｜tool▁call▁begin｜>$name<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), between=""),
        starts=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        template=("<｜tool▁calls▁begin｜>",),
        text_arguments=True,
    ),
    "deepseek_v4": Family(
        _DSML,
        starts=("<｜DSML｜tool_calls>",),
        end="</｜DSML｜tool_calls>",
        template=("<｜DSML｜tool_calls>",),
    ),
    "deepseek_v32": Family(
        _DSML,
        starts=("<｜DSML｜function_calls>",),
        end="</｜DSML｜function_calls>",
        token="｜DSML｜",
        text_arguments=True,
        system_tools=True,
    ),
    "llama3_json": Family(
        CallSyntax(call=(' "$name", "parameters": ', ""), native=(CallSyntax(call=(' "$name", "arguments": ', "")),)),
        starts=('{"name":', '<|python_tag|>{"name":'),
        end="}",
        around=("<|python_start|>", "<|python_end|>"),
        template=("header_", '{"name": "', '"parameters": '),
    ),
    "granite": Family(
        _LIST,
        starts=("<|tool_call|>[", "<|tool_call|> [", "<tool_call>["),
        end="]",
        template=("<|start_of_role|>", "<|tool_call|>"),
        in_content=True,
    ),
    "granite-20b-fc": Family(
        CallSyntax(call=(' "$name", "arguments": ', ""), join=""),
        starts=('<function_call> {"name":', '<function_call>{"name":'),
        end="}",
        template=("<|function_call_library|>",),
    ),
    "phi4_mini_json": Family(
        _LIST,
        starts=("<|tool_call|>[", "functools["),
        end="]",
        around=("<|/tool_call|>",),
        template=("<|tool|>", "<|/tool|>"),
        in_content=True,
        system_tools=True,
    ),
    "cohere_command": Family(
        replace(
            _COMMAND,
            call=('{"tool_call_id": "$index", "tool_name": "$name", "parameters": ', "}"),
            native=(_COMMAND,),
        ),
        starts=("<|START_ACTION|>",),
        end="<|END_ACTION|>",
        template=("<|START_ACTION|>",),
    ),
    "command_r": Family(
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

# -- thinking --------------------------------------------------------------------------------------


Entry = TypeVar("Entry")

_THINK = Reasoning("<think>", "</think>")
_HARMONY_CHANNELS = tuple(
    f"<|channel|>{channel}{kind}<|message|>"
    for channel in ("final", "commentary")
    for kind in ("", " <|constrain|>json", " json")
)

REASONINGS: Mapping[str, Reasoning] = {
    "openai_gptoss": Reasoning(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant", *_HARMONY_CHANNELS, "<|end|>"),
        repeats=True,
        opening="<|start|>assistant<|channel|>final<|message|>",
        field="thinking",
    ),
    "mistral": Reasoning("[THINK]", "[/THINK]", field="content"),
    "cohere_command": Reasoning(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        opening="<|START_RESPONSE|>",
        field="tool_plan",
    ),
    "granite": Reasoning("Here is my thought process:", "Here is my response:"),
    "granite3_3": Reasoning("<think>", "</think>", ("<response>", "</response>")),
    "gemma4": Reasoning("<|channel>thought", "<channel|>"),
    "longcat": Reasoning("<longcat_think>", "</longcat_think>"),
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "minimax_m2", "poolside_v1"), _THINK),
}
"""Keyed by vLLM's names."""

REASONING_NAMES: Mapping[str, str] = {
    "gptoss": "openai_gptoss",
    "gpt_oss": "openai_gptoss",
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
}

_BY_TOKENS = ("openai_gptoss", "mistral", "cohere_command")
_BY_TEXT = ("granite", "granite3_3")
_TOKEN = re.compile(r"<\|\w+\|>|\[/?\w+\]")


def reasoning_of(wrapped: TokenizerWrapper, template: str, name: str | None = None) -> Reasoning | None:
    """The marks of a model: those of this name, or those that its vocabulary and its chat template tell of.

    Raises:
        ConfigError: there are none of this name.
    """
    if name is not None:
        return named(REASONINGS, REASONING_NAMES, name, "model.reasoning_parser")
    vocabulary: Container[str] = wrapped.get_vocab()
    for found in map(REASONINGS.__getitem__, _BY_TOKENS):
        if all(token in vocabulary for token in _TOKEN.findall(found.start + found.end)):
            return found
    if wrapped.has_thinking:
        return Reasoning(wrapped.think_start, wrapped.think_end, tuple(wrapped.structural_markers))
    for found in map(REASONINGS.__getitem__, _BY_TEXT):
        if all(text in template for text in (found.start, found.end, *found.around)):
            return found
    return None


def named(entries: Mapping[str, Entry], others: Mapping[str, str], name: str, setting: str) -> Entry:
    """The entry of a name.

    Raises:
        ConfigError: there is none.
    """
    entry = entries.get(others.get(name, name))
    if entry is None:
        raise ConfigError(f"{setting}: there is no {name}; there are {', '.join(sorted({*entries, *others}))}")
    return entry
