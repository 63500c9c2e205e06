"""Earlier messages in the form that a model's own chat template takes, so that it writes what the model wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.core import Reasoning
from mlx_parallm.core.tool_text import TemplateMessage, calls_as_text
from mlx_parallm.model.tools.formats import FamilyToolFormat

_LOOKED_FOR = {"content": "'thinking'"}
"""Text of the templates that read a field, where its name is not enough."""


@dataclass(frozen=True, slots=True)
class TemplateFields:
    """How the templates of a family take calls, tools and reasoning."""

    tool_format: FamilyToolFormat
    reasoning: Reasoning | None

    def fit(
        self, messages: Sequence[TemplateMessage], variables: Mapping[str, Any], template: str
    ) -> Sequence[TemplateMessage]:
        """The messages for `template`, which gets `variables` too."""
        fitted = list(self._fitted(messages, template))
        if self.tool_format.family.system_tools and variables.get("tools"):
            tools = json.dumps([tool["function"] for tool in variables["tools"]], ensure_ascii=False)
            if not fitted or fitted[0].get("role") != "system":
                fitted.insert(0, {"role": "system", "content": ""})
            fitted[0] = {**fitted[0], "tools": tools}
        return fitted

    def _fitted(self, messages: Sequence[TemplateMessage], template: str) -> Iterator[TemplateMessage]:
        for message in messages:
            yield self._of_assistant(message, template) if message.get("role") == "assistant" else message

    def _of_assistant(self, message: TemplateMessage, template: str) -> TemplateMessage:
        family, calls = self.tool_format.family, message.get("tool_calls")
        if calls and family.in_content:
            message = calls_as_text(message, self.tool_format)
        if calls and family.text_arguments:
            message = {**message, "tool_calls": list(map(_as_text, calls))}
        thought, reasoning = message.get("reasoning_content"), self.reasoning
        if not thought or reasoning is None or _LOOKED_FOR.get(reasoning.field, reasoning.field) not in template:
            return message
        return _with_thought(message, thought, reasoning.field)


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with its arguments as JSON text."""
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _with_thought(message: TemplateMessage, thought: str, field: str) -> TemplateMessage:
    """The message with its reasoning in this field."""
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    if field == "content":
        text = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        return {**others, "content": [{"type": "thinking", "thinking": thought}, *text]}
    if field == "thinking" and others.get("tool_calls") and others.get("content"):
        # gpt-oss' template refuses a message that has thinking, content and calls.
        return {**others, "content": "", "thinking": f"{thought}\n{others['content']}"}
    return {**others, field: thought}
