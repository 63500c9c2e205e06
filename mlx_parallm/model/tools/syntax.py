"""How each family of models writes tool calls, as data: the text around calls, arguments and values.

Adding a family for which mlx-lm has a parser: add an entry to `SYNTAXES` under the parser's module name, and to
`tests/tool_families.py`, which checks that the parser reads back what is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Pairs are (text before, text after). `$name` stands for a tool's name, `$key` for an argument's, and `$index` for
    a call's number.

    call:      around a call's arguments
    argument:  around the value of each argument; None: the arguments are one JSON object
    comma:     between arguments
    bare:      around a value whose schema allows a string; such a value is written as it is, without quotes. None:
               every value is written as JSON
    forbidden: texts that a bare value must not contain, besides the text that ends it
    scalars:   no value may be an array or an object
    names:     regular expressions for the names of tools and of arguments that the parser reads back
    block:     around all calls between one start mark and one end mark
    between:   between two calls inside a block; None: each call has its own marks, with `join` between them
    native:    other forms that models of the family may write when nothing is enforced
    """

    call: tuple[str, str]
    argument: tuple[str, str] | None = None
    comma: str = ""
    bare: tuple[str, str] | None = None
    forbidden: tuple[str, ...] = ()
    scalars: bool = False
    names: tuple[str, str] = (r"[\w-]+", r"[^\s<>\"'=]+")
    block: tuple[str, str] = ("", "")
    between: str | None = None
    join: str = "\n"
    native: tuple[CallSyntax, ...] = ()

    @property
    def prefix(self) -> str:
        """The text before the name of a tool."""
        return self.call[0].partition("$name")[0]

    @property
    def all_marks(self) -> str:
        """All fixed texts, joined."""
        return "".join([*self.call, *self.block, *(self.argument or ()), *(self.bare or ()), self.between or ""])


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

SYNTAXES: Mapping[str, CallSyntax] = {
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
"""Keyed by the module name of mlx-lm's parser, which must read back what is written in this syntax."""
