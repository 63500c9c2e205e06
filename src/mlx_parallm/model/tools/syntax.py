"""How each family of models writes a call, as data: what stands around calls, arguments and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Syntax:
    """`$name`, `$key` and `$index` stand for a tool's name, an argument's, and a call's number.

    call:      around a call's arguments
    argument:  around the value of each; None: the arguments are one JSON object
    comma:     between arguments
    bare:      around a value that may be a string, written as it is; None: all values are JSON
    forbidden: what no bare text may have in it, beside what ends it
    scalars:   no value is an array or an object
    names:     regular expressions of the names of tools and of arguments that can be read back
    block:     around all calls of one pair of marks
    between:   two calls of one pair of marks; None: each call has marks of its own, with `join` between
    native:    other forms, in which models of the family may write calls where nothing is enforced
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
    native: tuple[Syntax, ...] = ()

    @property
    def lead(self) -> str:
        """What stands before the name of a tool."""
        return self.call[0].partition("$name")[0]

    @property
    def written(self) -> str:
        """All that stands in it."""
        return "".join([*self.call, *self.block, *(self.argument or ()), *(self.bare or ()), self.between or ""])


JSON = Syntax(call=('\n{"name": "$name", "arguments": ', "}\n"))
MISTRAL_LIST = Syntax(call=('{"name": "$name", "arguments": ', "}"), block=("[", "]"), between=", ")
_LONGCAT = Syntax(
    call=("$name\n", ""),
    argument=("<longcat_arg_key>$key</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
)
_KIMI_K3 = Syntax(
    call=('<|open|>call tool="$name" index="$index"<|sep|>', "<|close|>call<|sep|>"),
    argument=('<|open|>argument key="$key" type="string"<|sep|>', "<|close|>argument<|sep|>"),
    between="",
)
_IDENTIFIER = r"(?!\d)\w+"

SYNTAXES: Mapping[str, Syntax] = {
    "json_tools": JSON,
    "longcat": replace(JSON, native=(_LONGCAT,)),  # its parser reads both; that one needs an argument
    "mistral": Syntax(call=("$name[ARGS]", ""), between="[TOOL_CALLS]"),
    "kimi_k2": Syntax(
        call=("<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>", "<|tool_call_end|>"), between=""
    ),
    "kimi_k3": Syntax(
        call=(
            '<|open|>call tool="$name" index="$index"<|sep|><|open|>json type="object"<|sep|>',
            "<|close|>json<|sep|><|close|>call<|sep|>",
        ),
        between="",
        native=(_KIMI_K3,),
    ),
    "qwen3_coder": Syntax(
        call=("\n<function=$name>\n", "</function>\n"),
        argument=("<parameter=$key>\n", "\n</parameter>\n"),
        bare=("", ""),
    ),
    "glm47": Syntax(
        call=("$name\n", ""),
        argument=("<arg_key>$key</arg_key>\n<arg_value>", "</arg_value>\n"),
        bare=("", ""),
    ),
    "minimax_m2": Syntax(
        call=('\n<invoke name="$name">\n', "</invoke>"),
        argument=('<parameter name="$key">', "</parameter>\n"),
        bare=("", ""),
        block=("", "\n"),
        between="",
    ),
    "minicpm5": Syntax(call=('"$name">', ""), argument=('<param name="$key">', "</param>"), bare=("", ""), join=""),
    "muse_spark": Syntax(
        call=('\n<atem:invoke name="$name">', "\n</atem:invoke>"),
        argument=('\n<atem:parameter name="$key">', "</atem:parameter>"),
        block=("", "\n"),
        between="",
    ),
    "pythonic": Syntax(
        call=("$name(", ")"),
        argument=("$key=", ""),
        comma=", ",
        names=(_IDENTIFIER, _IDENTIFIER),
        block=("[", "]"),
        between=", ",
    ),
    "gemma4": Syntax(
        call=("call:$name{", "}"),
        argument=("$key:", ""),
        comma=",",
        bare=('<|"|>', '<|"|>'),
        scalars=True,
        names=(r"[\w-]+", r"\w+"),
        join="",
    ),
    "function_gemma": Syntax(
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
"""By the name of mlx-lm's parser, which has to read back what is written so."""
