"""Messages to a prompt: by the model's own template, which some have to be helped to speak of tools.

A template that knows no tools is given only what it knows: the tools are described in the system message, calls are
text of the assistant's turn, and results are turns of the user's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from mlx_parallm.core import TextTokenizer, Tool, ToolFormat

TURN = Mapping[str, Any]

_TOLD = """\
You can call functions. Here are their JSON schemas, one a line:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as JSON, like this:
{start}
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
{end}

Call a function only when you need it. Otherwise answer in plain words."""


def rendered(
    messages: Sequence[TURN],
    tools: Sequence[Tool],
    tokenizer: TextTokenizer,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
    at_most: int,
) -> list[int]:
    """The prompt's token ids. Raises what `TextTokenizer.apply_chat_template` raises."""
    calls = tokenizer.tool_format
    if not calls.in_template:
        messages = _with_tools(list(_plain(messages, calls)), tools, calls)
    elif tools:
        variables = {**variables, "tools": list(tools)}
    return tokenizer.apply_chat_template(messages, add_generation_prompt, at_most, **variables)


def _with_tools(messages: Sequence[TURN], tools: Sequence[Tool], calls: ToolFormat) -> Sequence[TURN]:
    if not tools:
        return messages
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = _TOLD.format(tools=lines, start=calls.start, end=calls.end)
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _plain(messages: Sequence[TURN], calls: ToolFormat) -> Iterator[TURN]:
    for results, turns in groupby(messages, key=lambda turn: turn["role"] == "tool"):
        if results:
            texts = [f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in turns]
            yield {"role": "user", "content": "\n".join(texts)}
        else:
            yield from (_without_calls(turn, calls) for turn in turns)


def _without_calls(turn: TURN, calls: ToolFormat) -> TURN:
    if "tool_calls" not in turn:
        return turn
    made = [json.dumps(call["function"], ensure_ascii=False) for call in turn["tool_calls"]]
    said = [turn["content"]] if turn["content"] else []
    texts = [f"{calls.start}\n{text}\n{calls.end}" for text in made]
    others = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**others, "content": "\n".join([*said, *texts])}
