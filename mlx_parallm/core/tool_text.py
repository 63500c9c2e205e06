"""Tools as text, for chat templates that do not support them: the tools are described in the system message, calls
become text of the assistant's message, and results become messages of the user."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from mlx_parallm.core.text import Tool, ToolFormat

TemplateMessage = Mapping[str, Any]
"""A message as chat templates take it."""

TOOL_INSTRUCTIONS = """\
You can call functions. Here are their JSON schemas, one a line:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as JSON, like this:
{start}
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
{end}

Call a function only when you need it. Otherwise answer in plain words."""


def tools_as_text(
    turns: Sequence[TemplateMessage], tools: Sequence[Tool], tool_format: ToolFormat
) -> Sequence[TemplateMessage]:
    """The conversation, at least one message, with tools, calls and results as text."""
    return _describe_tools(list(_without_tools(turns, tool_format)), tools, tool_format)


def calls_as_text(turn: TemplateMessage, tool_format: ToolFormat) -> TemplateMessage:
    """A message of the assistant with its calls as text."""
    if "tool_calls" not in turn:
        return turn
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn["tool_calls"]]
    texts = [f"{tool_format.start}\n{call}\n{tool_format.end}" for call in calls]
    others = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**others, "content": "\n".join([turn["content"], *texts] if turn["content"] else texts)}


def _describe_tools(
    turns: Sequence[TemplateMessage], tools: Sequence[Tool], tool_format: ToolFormat
) -> Sequence[TemplateMessage]:
    """Describes the tools, if there are any, in the system message."""
    if not tools:
        return turns
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = TOOL_INSTRUCTIONS.format(tools=lines, start=tool_format.start, end=tool_format.end)
    if turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{instructions}"}, *turns[1:]]
    return [{"role": "system", "content": instructions}, *turns]


def _without_tools(turns: Sequence[TemplateMessage], tool_format: ToolFormat) -> Iterator[TemplateMessage]:
    """The same conversation with calls and results as text."""
    for are_results, group in groupby(turns, key=lambda turn: turn["role"] == "tool"):
        if are_results:
            texts = [f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in group]
            yield {"role": "user", "content": "\n".join(texts)}
        else:
            yield from (calls_as_text(turn, tool_format) for turn in group)
