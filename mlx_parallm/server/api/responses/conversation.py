"""A conversation of `/v1/responses`: its input items (OpenAI's `ResponseInputItem`), the chat messages that they stand
for, and the stored responses that clients can retrieve and continue.

Output items of a response can be sent back unchanged.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, TypeAdapter, ValidationInfo

from mlx_parallm.server.api.fields import Neutral, Validate, WireInput, check_text_parts, read_nested, refused
from mlx_parallm.server.api.responses.objects import new_id
from mlx_parallm.server.api.responses.tools import INPUT, shown_name

ChatMessageFields = dict[str, Any]
"""The fields of a message, as chat's `Message` validates them."""


class ItemText(WireInput):
    """A part of a message's content."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    """Either value, for any role."""
    text: str
    """The text."""


_TEXT_PARTS = TypeAdapter(list[ItemText])


def _joined_parts(value: object, info: ValidationInfo) -> object:
    """The text of all parts, one part per line, as in chat. Other values are returned unchanged."""
    if not isinstance(value, list):
        return value
    check_text_parts(value, "input_text", "output_text")
    return "\n".join(part.text for part in read_nested(_TEXT_PARTS.validate_python, value, info))


Text = Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=str | list[ItemText])]


class MessageItem(WireInput):
    """A message."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    """May be left out."""
    role: Literal["system", "developer", "user", "assistant"]
    """The author. `developer` is the newer name of `system`."""
    content: Text
    """Text, or a list of text parts."""

    def message(self) -> ChatMessageFields:
        return {"role": self.role, "content": self.content}


class CallItem(WireInput):
    """A function call that the model made."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "caller"})
    NEUTRAL: ClassVar[Neutral] = {"async": (False,)}

    type: Literal["function_call"]
    call_id: str
    """The id by which the item with the output refers to the call."""
    name: str
    """The function's name."""
    namespace: str | None = None
    """The namespace of the function, if it is in one."""
    arguments: str
    """JSON text."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """An `incomplete` call was cut off; it was never run and is left out of the prompt."""

    def message(self) -> ChatMessageFields:
        return _call_message(self, self.arguments)


class CustomCallItem(WireInput):
    """A call of a custom tool that the model made."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "caller"})
    NEUTRAL: ClassVar[Neutral] = {"async": (False,)}

    type: Literal["custom_tool_call"]
    call_id: str
    """The id by which the item with the output refers to the call."""
    name: str
    """The tool's name."""
    namespace: str | None = None
    """The namespace of the tool, if it is in one."""
    input: str
    """The text for the tool."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """An `incomplete` call was cut off; it was never run and is left out of the prompt."""

    def message(self) -> ChatMessageFields:
        return _call_message(self, json.dumps({INPUT: self.input}, ensure_ascii=False))


def _call_message(call: CallItem | CustomCallItem, arguments: str) -> ChatMessageFields:
    """The chat message of a call; empty for an incomplete call."""
    if call.status == "incomplete":
        return {}
    function = {"name": shown_name(call.name, call.namespace), "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]}


class CallOutputItem(WireInput):
    """The output of a function or a custom tool that was called."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "caller", "name", "namespace"})

    type: Literal["function_call_output", "custom_tool_call_output"]
    """Either value: the id says which call it was."""
    call_id: str
    """The id of the call."""
    output: Text
    """Text, or a list of text parts."""

    def message(self) -> ChatMessageFields:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class ReasoningPart(WireInput):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text", "text"]
    """Either value."""
    text: str
    """The text."""


class ReasoningItem(WireInput):
    """The model's reasoning. Only `content` is read; the summary and the encrypted form of other servers are
    ignored."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "summary", "encrypted_content"})

    type: Literal["reasoning"]
    content: list[ReasoningPart] = Field(default_factory=list)
    """The reasoning. Without it the item adds nothing to the prompt."""

    def message(self) -> ChatMessageFields:
        """The chat message of the reasoning; empty without content."""
        reasoning = "".join(part.text for part in self.content)
        return {"role": "assistant", "reasoning_content": reasoning} if reasoning else {}


InputItem = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem
ITEM_TYPES: Mapping[object, type[InputItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


def _item(value: object, info: ValidationInfo) -> InputItem:
    if not isinstance(value, dict):
        raise refused("must be an item: an object with a type")
    kind = value.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEM_TYPES:
        raise refused(f"not a supported type of items; those are {', '.join(map(str, ITEM_TYPES))}", "type")
    validate: Validate[InputItem] = ITEM_TYPES[kind].model_validate
    return read_nested(validate, value, info)


Item = Annotated[InputItem, PlainValidator(_item, json_schema_input_type=InputItem)]
ITEM_LIST: TypeAdapter[list[InputItem]] = TypeAdapter(list[Item])


def messages_of(items: Iterable[InputItem]) -> list[ChatMessageFields]:
    """The items as chat messages. Reasoning, text and calls of the assistant that follow each other become one message.
    A second text begins a new message, and so does reasoning that comes after text or calls."""
    messages: list[ChatMessageFields] = []
    for message in filter(None, (item.message() for item in items)):
        if messages and _continues(messages[-1], message):
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _continues(before: ChatMessageFields, message: ChatMessageFields) -> bool:
    if not before["role"] == message["role"] == "assistant":
        return False
    if "tool_calls" in message:
        return True
    return "content" not in before and ("content" in message or "tool_calls" not in before)


def _joined(before: ChatMessageFields, message: ChatMessageFields) -> ChatMessageFields:
    added = {name: value for name, value in message.items() if name != "role"}
    return before | {name: before[name] + value if name in before else value for name, value in added.items()}


# -- stored responses -------------------------------------------------------------------------------

ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}

ItemFields = dict[str, Any]
"""An input item with its id and status, as OpenAI lists it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and all its input items, both as JSON. The items include those of earlier turns, so a response stays
    whole when an earlier one is deleted. `owner`: the name of the key that made it."""

    response: bytes
    input_items: bytes
    owner: str = ""

    @property
    def size(self) -> int:
        """The size of both parts in bytes."""
        return len(self.response) + len(self.input_items)

    def items(self) -> list[ItemFields]:
        """The conversation up to the response's end."""
        return [*json.loads(self.input_items), *json.loads(self.response)["output"]]


class ResponseStore:
    """Keeps the most recently used responses in memory. Its methods can be called from any thread.

    To make room, the least recently used response of the key that holds the most is dropped, so no key's responses push
    out those of one that holds less.

    Invariant: it holds at most `most` responses and at most `most_bytes` bytes; `held_bytes` is the current number.
    """

    def __init__(self, most: int = 1000, most_bytes: int = 64 * 2**20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = RLock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, and drops others to make room. One that is larger than `most_bytes` is not stored."""
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._stored[response_id] = stored
            self.held_bytes += stored.size
            while (crowded := len(self._stored) > self._most) or self.held_bytes > self._most_bytes:
                held = Counter[str]()
                for each in self._stored.values():
                    held[each.owner] += 1 if crowded else each.size
                [(most, _)] = held.most_common(1)
                self.delete(next(name for name, each in self._stored.items() if each.owner == most))

    def find(self, response_id: str) -> StoredResponse | None:
        """The response, which becomes the most recently used one. None if it is not stored."""
        with self._lock:
            if response_id in self._stored:
                self._stored.move_to_end(response_id)
            return self._stored.get(response_id)

    def delete(self, response_id: str) -> None:
        """Deletes a response that is stored."""
        with self._lock:
            self.held_bytes -= self._stored.pop(response_id).size


def listed_item(item: InputItem) -> ItemFields:
    """An item that a client sent, as OpenAI lists it: with a new id and a status."""
    fields = {"status": "completed", **item.model_dump(exclude_none=True), "id": new_id(ID_PREFIXES[item.type])}
    if isinstance(item, MessageItem):
        return {**fields, "content": [_text_part(item)]}
    return {**fields, "summary": []} if item.type == "reasoning" else fields


def _text_part(item: MessageItem) -> dict[str, Any]:
    if item.role == "assistant":
        return {"type": "output_text", "text": item.content, "annotations": []}
    return {"type": "input_text", "text": item.content}
