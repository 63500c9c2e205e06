"""Calls of tools in the messages that chat templates get.

For templates that do not support tools, they are text: the tools are described in the system message, calls become text
of the assistant's message, and results become messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mlx_parallm.core.text import TextTokenizer, Tool

if TYPE_CHECKING:
    from mlx_parallm.model.tools.formats import ToolFormat

TemplateMessage = Mapping[str, Any]
"""A message as chat templates take it."""

TOOL_INSTRUCTIONS = """\
You can call functions. Here are their JSON schemas, one a line:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as JSON, like this:
{example}

Call a function only when you need it. Otherwise answer in plain words."""


def read_arguments(text: str) -> object:
    """The object that the text of a call's arguments is; the text if it is none, or has numbers that JSON does not.
    Half of a surrogate pair, which UTF-8 does not have, becomes a question mark, as in the calls that the model
    writes."""
    try:
        parsed = json.loads(text or "{}")
        cleaned = json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        return json.loads(cleaned) if isinstance(parsed, dict) else text
    except (ValueError, RecursionError):
        return text


def lost_result(turns: Sequence[tuple[str, Collection[str], str | None]]) -> int | None:
    """The index of the first result of a tool whose call is missing.

    A result without an id belongs to any call. Results before the first message of the user or the assistant belong to
    calls that were cut off with the beginning of the conversation; one without such a message has lost its call.

    Args:
        turns: of each message, its role, the ids of its calls, and the id of the call whose result it is.
    """
    begins = next((index for index, (role, _, _) in enumerate(turns) if role in ("user", "assistant")), -1)
    known: set[str] = set()
    for index, (_, calls, result) in enumerate(turns):
        known.update(calls)
        if result and result not in known and index > begins:
            return index
    return None


def chat_prompt(
    tokenizer: TextTokenizer,
    turns: Sequence[TemplateMessage],
    tools: Sequence[Tool] = (),
    add_generation_prompt: bool = True,
    at_most: int | None = None,
) -> list[int]:
    """The token ids that the model's own template makes of a conversation. Raises what `apply_chat_template` raises."""
    if not tokenizer.tool_format.in_template:
        turns, tools = tools_as_text(turns, tools, tokenizer.tool_format), ()
    variables: dict[str, Any] = {"tools": list(tools)} if tools else {}
    return tokenizer.apply_chat_template(turns, add_generation_prompt, at_most, **variables)


def tools_as_text(
    turns: Sequence[TemplateMessage], tools: Sequence[Tool], tool_format: ToolFormat
) -> Sequence[TemplateMessage]:
    """The conversation, at least one message, with tools, calls and results as text."""
    return _describe_tools(list(_without_tools(turns, tool_format)), tools, tool_format)


def calls_as_text(turn: TemplateMessage, tool_format: ToolFormat) -> TemplateMessage:
    """A message of the assistant with its calls as text."""
    if "tool_calls" not in turn:
        return turn
    calls = tool_format.written([call["function"] for call in turn["tool_calls"]])
    others = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**others, "content": f"{turn['content']}\n{calls}" if turn["content"] else calls}


def _describe_tools(
    turns: Sequence[TemplateMessage], tools: Sequence[Tool], tool_format: ToolFormat
) -> Sequence[TemplateMessage]:
    """Describes the tools, if there are any, in the system message."""
    if not tools:
        return turns
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = tool_format.written([{"name": "function_name", "arguments": {"argument": "value"}}])
    instructions = TOOL_INSTRUCTIONS.format(tools=lines, example=example)
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
