"""The format of a model's tool calls: mlx-lm's parser of its family, and how that family writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from mlx_parallm.core import Tool, ToolCall, UnwritableToolError
from mlx_parallm.model.tools import lark
from mlx_parallm.model.tools.schemas import plain
from mlx_parallm.model.tools.syntax import JSON, MISTRAL_LIST, SYNTAXES, Syntax
from mlx_parallm.model.tools.unfinished import unfinished

Parser = Callable[[str, Any], Any]

_QUOTE = re.compile(r'\\.|[^"\\]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Family:
    """Implements `core.ToolFormat`. `syntax` None: mlx-lm reads this family's calls, and nobody here writes them."""

    start: str
    end: str
    in_template: bool
    spelled: frozenset[int]
    parser: Parser
    syntax: Syntax | None

    def inside_value(self, text: str) -> bool:
        """Known of calls that are JSON: a string is open."""
        return self.syntax is not None and self.syntax.argument is None and len(_QUOTE.sub("", text)) % 2 == 1

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """See `core.ToolFormat.parse`. A call of a tool that is not among `tools` is malformed too."""
        try:
            parsed = self.parser(text, [plain(tool) for tool in tools])
        except Exception as error:  # a parser is handed whatever the model wrote, and may trip over it in any way
            raise ValueError("no call can be read") from error
        calls = tuple(_call(call) for call in (parsed if isinstance(parsed, list) else [parsed]))
        known = {tool["function"]["name"] for tool in tools}
        if not calls or any(call.name not in known for call in calls):
            raise ValueError("it calls no tool that there is")
        return calls

    def unfinished(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """See `core.ToolFormat.unfinished`."""
        if self.syntax is None:
            return self.parse(text, tools)
        names = frozenset(tool["function"]["name"] for tool in tools)
        return unfinished(self.syntax, lambda part: self.parse(part, tools), text, names)

    def grammar(self, tools: Sequence[Tool], most: int, free: bool) -> str:
        """See `core.ToolFormat.grammar`."""
        if self.syntax is None:
            raise UnwritableToolError(0, "calls of this model's family cannot be enforced")
        return lark.grammar(self.syntax, (self.start, self.end), tools, most, free)


HERMES = Family(
    json_tools.tool_call_start, json_tools.tool_call_end, False, frozenset(), json_tools.parse_tool_call, JSON
)


def family_of(wrapped: TokenizerWrapper, template: str | None, spelled_in: Callable[[str], frozenset[int]]) -> Family:
    """Of a tokenizer, its default chat template, and the special tokens that some marks are made of.

    A model for which mlx-lm names no parser writes calls as Hermes models do, and has to be told so in a message.
    """
    if wrapped.tool_parser is None:
        return HERMES
    parser, start, end = wrapped.tool_parser, wrapped.tool_call_start, wrapped.tool_call_end
    syntax = syntax_of(parser, template or "")
    return Family(start, end, True, spelled_in(start + end + (syntax.written if syntax else "")), parser, syntax)


def syntax_of(parser: Parser, template: str) -> Syntax | None:
    name = parser.__module__.rpartition(".")[2]
    if name == "mistral" and "[ARGS]" not in template:
        return MISTRAL_LIST
    return SYNTAXES.get(name)


def _call(parsed: Any) -> ToolCall:
    """Raises ValueError: it is no call."""
    if not isinstance(parsed, dict):
        raise ValueError("a call is an object")
    name, arguments, call_id = parsed.get("name"), parsed.get("arguments", {}), parsed.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and its arguments are an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair is JSON and no text: nobody could be sent it.
    return ToolCall(name, text.encode("utf-8", "replace").decode(), call_id if isinstance(call_id, str) else None)
