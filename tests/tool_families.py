"""Every family of tool calls, and a text of each: `from tool_families import FAMILIES, TEXTS`."""

from __future__ import annotations

from typing import Any

from mlx_parallm.model.tools.formats import FAMILIES

__all__ = ["ASKED", "ENDINGS", "FAMILIES", "OTHER_TEXTS", "TEXTS", "TOOLS", "tool"]


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


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
    "openai": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "São Paulo", "days": 3}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "São Paulo", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "São Paulo", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">São Paulo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "São Paulo", "days": 3}}',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "São Paulo", "days": 3}}]',
    "granite-20b-fc": '<function_call> {"name": "get_weather", "arguments": {"city": "São Paulo", "days": 3}}',
    "phi4_mini_json": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "São Paulo", "days": 3}}]',
    "cohere_command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    '{"city": "São Paulo", "days": 3}}\n]<|END_ACTION|>',
    "command_r": 'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
    '{"city": "São Paulo", "days": 3}\n    }\n]```',
}
TEXTS["deepseek_v4"] = TEXTS["deepseek_v32"].replace("function_calls", "tool_calls")

OTHER_TEXTS = [
    ("openai", "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"),
    ("openai", "<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>"),
    ("openai", "<|channel|>analysis to=functions.get_weather code<|message|>"),
    ("openai", " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": '),
    ("llama3_json", '{"name":"get_weather","arguments":'),
    ("granite", '<|tool_call|> [{"name":"get_weather","arguments":'),
    ("granite", '<tool_call>[{"name": "get_weather", "arguments": '),
    ("granite-20b-fc", '<function_call>{"name":"get_weather","arguments":'),
    ("phi4_mini_json", 'functools[{"name": "get_weather", "arguments": '),
    ("cohere_command", '<|START_ACTION|>[\n    {"tool_name": "get_weather", "parameters": '),
    ("command_r", 'Action:```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '),
]
"""Families, and other beginnings of the same call, up to its arguments."""

ENDINGS = {
    "deepseek_v3": "\n```\n<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>",
    "llama3_json": "}",
    "granite": "}]",
    "granite-20b-fc": "}",
    "phi4_mini_json": "}]<|/tool_call|>",
    "cohere_command": "}\n]<|END_ACTION|>",
    "command_r": "\n    }\n]\n```",
}
"""What follows the arguments of a call of `OTHER_TEXTS`, if anything does."""
