"""Every family of tool calls that mlx-lm knows, and a text of each: `from tool_families import FAMILIES, TEXTS`."""

from __future__ import annotations

import importlib
from typing import Any

from mlx_parallm.model.tools.formats import FamilyToolFormat, syntax_of

PARSERS = (
    "function_gemma",
    "gemma4",
    "glm47",
    "json_tools",
    "kimi_k2",
    "kimi_k3",
    "laguna",
    "longcat",
    "minicpm5",
    "minimax_m2",
    "mistral",
    "muse_spark",
    "pythonic",
    "qwen3_coder",
)


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def family(name: str, template: str = "[ARGS]") -> FamilyToolFormat:
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    syntax = syntax_of(parser.parse_tool_call, template)
    return FamilyToolFormat(
        parser.tool_call_start, parser.tool_call_end, True, frozenset(), parser.parse_tool_call, syntax
    )


FAMILIES = {name: family(name) for name in PARSERS} | {"mistral_list": family("mistral", "no such mark")}

TOOLS = (
    tool("get_weather", properties={"city": {"type": "string"}, "days": {"type": "integer"}}, required=["city"]),
    tool("now", properties={}),
)

ASKED = ("get_weather", {"city": "São Paulo", "days": 3})
"""The call that each of `TEXTS` makes."""

TEXTS = {
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>São Paulo<escape>,days:3}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>São Paulo<|"|>,days:3}<tool_call|>',
    "glm47": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São Paulo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "json_tools": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "São Paulo", "days": 3}}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "São Paulo", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>São Paulo<|close|>argument<|sep|><|open|>argument key="days" type="integer"<|sep|>3'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "longcat": "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>São Paulo"
    "</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n"
    "</longcat_tool_call>",
    "minicpm5": '<function name="get_weather"><param name="city">São Paulo</param>'
    '<param name="days">3</param></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">São Paulo</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "São Paulo", "days": 3}',
    "mistral_list": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "São Paulo", "days": 3}}]',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">São Paulo'
    '</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "pythonic": '<|tool_call_start|>[get_weather(city="São Paulo", days=3)]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n<parameter=days>"
    "\n3\n</parameter>\n</function>\n</tool_call>",
}
TEXTS["laguna"] = TEXTS["glm47"]
