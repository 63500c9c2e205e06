"""The items of a Responses API conversation as clients send them, and the chat messages that they are.

Protocol: OpenAI's `ResponseInputItem`. What the server answers with can be sent back as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, TypeAdapter, ValidationInfo

from mlx_parallm.server.wire.base import Validate, WireInput, read_nested, refused
from mlx_parallm.server.wire.neutral import RESPONSES_CALL, RESPONSES_CALL_OUTPUT, Neutral

ChatMessageFields = dict[str, Any]
"""A message as `wire.chat.Message` takes it."""

TEXT_PARTS = ("input_text", "output_text")


class ItemText(WireInput):
    """Text of a message, whoever says it."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    """Either, for any role."""
    text: str
    """The text."""


_PARTS = TypeAdapter(list[ItemText])


def _joined_parts(value: object, info: ValidationInfo) -> object:
    """Text parts become one text, a line each, as in chat."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
            raise refused('each part must be {"type": "input_text", "text": …}: this model reads text alone')
    return "\n".join(part.text for part in read_nested(_PARTS.validate_python, value, info))


Text = Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=str | list[ItemText])]


class MessageItem(WireInput):
    """What somebody said."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    """May be left out."""
    role: Literal["system", "developer", "user", "assistant"]
    """Who; `developer` is the newer name of `system`."""
    content: Text
    """A text, or text parts, a line each."""

    def message(self) -> ChatMessageFields:
        return {"role": self.role, "content": self.content}


class CallItem(WireInput):
    """A call that the model made."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "caller"})
    NEUTRAL: ClassVar[Neutral] = RESPONSES_CALL

    type: Literal["function_call"]
    """Names the kind of item."""
    call_id: str
    """What the output names."""
    name: str
    """Of the function."""
    arguments: str
    """JSON text."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """`incomplete`: it was cut off and never made, so that the model is not told of it."""

    def message(self) -> ChatMessageFields:
        """Empty when it was never made."""
        if self.status == "incomplete":
            return {}
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}


class CallOutputItem(WireInput):
    """What a called function returned."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "caller", "name"})
    NEUTRAL: ClassVar[Neutral] = RESPONSES_CALL_OUTPUT

    type: Literal["function_call_output"]
    """Names the kind of item."""
    call_id: str
    """Of the call."""
    output: Text
    """A text, or text parts, a line each."""

    def message(self) -> ChatMessageFields:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class ThoughtPart(WireInput):
    """Part of what the model thought."""

    type: Literal["reasoning_text"]
    """Always the same."""
    text: str
    """The text."""


class ReasoningItem(WireInput):
    """What the model thought. A summary is not what it thought, and what somebody else encrypted cannot be read."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "summary", "encrypted_content"})

    type: Literal["reasoning"]
    """Names the kind of item."""
    content: list[ThoughtPart] = Field(default_factory=list)
    """The thought; left out, the item says nothing."""

    def message(self) -> ChatMessageFields:
        """Empty when it says nothing."""
        thought = "".join(part.text for part in self.content)
        return {"role": "assistant", "reasoning_content": thought} if thought else {}


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem
ITEMS: Mapping[object, type[InputItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


def _item(value: object, info: ValidationInfo) -> InputItem:
    if not isinstance(value, dict):
        raise refused("must be an item: an object with a type")
    kind = value.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise refused(f"items of this type are not supported; those of {', '.join(map(str, ITEMS))} are", "type")
    validate: Validate[InputItem] = ITEMS[kind].model_validate
    return read_nested(validate, value, info)


Item = Annotated[InputItem, PlainValidator(_item, json_schema_input_type=InputItem)]
ITEM_LIST: TypeAdapter[list[InputItem]] = TypeAdapter(list[Item])


def messages_of(items: Iterable[InputItem]) -> list[ChatMessageFields]:
    """The items as chat messages: what an assistant thought, said and called, in this order, is one message."""
    messages: list[ChatMessageFields] = []
    for said in filter(None, (item.message() for item in items)):
        if messages and _continues(messages[-1], said):
            messages[-1] = _joined(messages[-1], said)
        else:
            messages.append(said)
    return messages


def _continues(turn: ChatMessageFields, said: ChatMessageFields) -> bool:
    if not turn["role"] == said["role"] == "assistant":
        return False
    if "tool_calls" in said:
        return True
    return "content" not in turn and ("content" in said or "tool_calls" not in turn)


def _joined(turn: ChatMessageFields, said: ChatMessageFields) -> ChatMessageFields:
    more = {name: turn[name] + value if name in turn else value for name, value in said.items() if name != "role"}
    return turn | more
