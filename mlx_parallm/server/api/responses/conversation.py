"""A conversation of `/v1/responses`: its input items (OpenAI's `ResponseInputItem`), the chat messages that they stand
for, and the stored responses that clients can retrieve and continue.

Output items of a response can be sent back unchanged. So can those of a server that runs tools: what these did is text
for the model.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)

from mlx_parallm.errors import shown
from mlx_parallm.server.api.chat.messages import MAX_ARGUMENT_DEPTH, RefusalPart, part_reader
from mlx_parallm.server.api.fields import Neutral, Validate, WireInput, check_text_parts, read_nested, refused
from mlx_parallm.server.api.grammar_fields import is_shallow
from mlx_parallm.server.api.responses.objects import new_id
from mlx_parallm.server.api.responses.tools import INPUT, shown_name

ChatMessageFields = dict[str, Any]
"""The fields of a message, as chat's `Message` validates them."""
MAX_ITEM_ID = 128


class ItemText(WireInput):
    """A part of a message's content."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    """Either value, for any role."""
    text: str
    """The text."""


_TEXT_PARTS = TypeAdapter(list[Annotated[ItemText | RefusalPart, PlainValidator(part_reader(ItemText))]])


def _joined_parts(value: object, info: ValidationInfo) -> object:
    """The text of all parts, one part per line, as in chat. Other values are returned unchanged."""
    if not isinstance(value, list):
        return value
    check_text_parts(value, "input_text", "output_text", "refusal")
    return "\n".join(part.text for part in read_nested(_TEXT_PARTS.validate_python, value, info))


Text = Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=str | list[ItemText | RefusalPart])]


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

    type: Literal["reasoning_text", "summary_text", "text"]
    """Any value."""
    text: str
    """The text."""


class ReasoningItem(WireInput):
    """The model's reasoning. The encrypted form of other servers is ignored."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "encrypted_content"})

    type: Literal["reasoning"]
    content: list[ReasoningPart] = Field(default_factory=list)
    """The reasoning."""
    summary: list[ReasoningPart] = Field(default_factory=list)
    """What another server says of reasoning that it does not show. It is read if there is no `content`."""

    def message(self) -> ChatMessageFields:
        """The chat message of the reasoning; empty without a text."""
        reasoning = "".join(part.text for part in self.content) or "\n\n".join(part.text for part in self.summary)
        return {"role": "assistant", "reasoning_content": reasoning} if reasoning else {}


KEPT_ITEMS: Mapping[str, tuple[str, ...]] = {
    "apply_patch_call": ("operation",),
    "apply_patch_call_output": ("status", "output"),
    "code_interpreter_call": ("code", "outputs"),
    "computer_call": ("action", "actions"),
    "file_search_call": ("queries", "results"),
    "image_generation_call": ("revised_prompt",),
    "local_shell_call": ("action",),
    "local_shell_call_output": ("output",),
    "mcp_approval_request": (),
    "mcp_call": ("server_label", "name", "arguments", "output", "error"),
    "mcp_list_tools": (),
    "program": ("code",),
    "program_output": ("result",),
    "shell_call": ("action",),
    "shell_call_output": ("output",),
    "tool_search_call": (),
    "web_search_call": ("action", "results"),
}
"""The fields of the items about other servers' tools that the model reads."""


class KeptItem(BaseModel):
    """What a tool that another server runs did. The model reads it as JSON text; an item that says nothing adds nothing
    to the prompt."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: Annotated[str, Field(json_schema_extra={"enum": [*KEPT_ITEMS]})]
    """Which kind of tool it was. The other fields are those of OpenAI's item."""

    @model_validator(mode="after")
    def _check_depth(self) -> KeptItem:
        if not is_shallow(self.model_extra, MAX_ARGUMENT_DEPTH):
            raise refused(f"is nested deeper than {MAX_ARGUMENT_DEPTH} levels")
        return self

    def message(self) -> ChatMessageFields:
        fields = self.model_extra or {}
        kept = {name: fields[name] for name in KEPT_ITEMS[self.type] if fields.get(name)}
        role = "user" if self.type.endswith("_output") else "assistant"
        return {"role": role, "content": f"[{self.type}] {json.dumps(kept, ensure_ascii=False)}"} if kept else {}


class ItemReference(WireInput):
    """An item of a stored response, which takes its place."""

    type: Literal["item_reference"] = "item_reference"
    """May be left out."""
    id: Annotated[str, Field(max_length=MAX_ITEM_ID)]
    """The item's id."""

    def message(self) -> ChatMessageFields:
        raise AssertionError("the item takes the place of a reference first")


InputItem = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | KeptItem | ItemReference
ITEM_TYPES: Mapping[object, type[InputItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
    **dict.fromkeys(KEPT_ITEMS, KeptItem),
}


def _item(value: object, info: ValidationInfo) -> InputItem:
    if isinstance(value, InputItem):
        return value
    if not isinstance(value, dict):
        raise refused("must be an item: an object with a type")
    kind = value.get("type") or ("item_reference" if value.keys() == {"id"} else "message")
    if not isinstance(kind, str) or kind not in ITEM_TYPES:
        raise refused(
            f"items of the type {shown(str(kind))} cannot be kept without changing what the conversation says; leave "
            f"them out. Those that can: {', '.join(map(str, ITEM_TYPES))}",
            "type",
        )
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
    whole when an earlier one is deleted. `owner`: the name of the key that made it. `added`: the ids of the items that
    no earlier turn had."""

    response: bytes
    input_items: bytes
    owner: str = ""
    added: tuple[str, ...] = ()

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
        self._responses_of_items: dict[str, str] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, and drops others to make room. One that is larger than `most_bytes` is not stored."""
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._stored[response_id] = stored
            self._responses_of_items |= dict.fromkeys(stored.added, response_id)
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

    def find_item(self, item_id: str) -> StoredResponse | None:
        """The response that added an item. None if it is not stored."""
        with self._lock:
            return self.find(self._responses_of_items.get(item_id, ""))

    def delete(self, response_id: str) -> None:
        """Deletes a response that is stored."""
        with self._lock:
            stored = self._stored.pop(response_id)
            self.held_bytes -= stored.size
            for item in stored.added:
                del self._responses_of_items[item]


def listed_item(item: InputItem) -> ItemFields:
    """An item that a client sent, as OpenAI lists it: with a new id and a status."""
    prefix = ID_PREFIXES.get(item.type, "item")
    fields = {"status": "completed", **item.model_dump(exclude_none=True), "id": new_id(prefix)}
    return {**fields, "content": [_text_part(item)]} if isinstance(item, MessageItem) else fields


def _text_part(item: MessageItem) -> dict[str, Any]:
    if item.role == "assistant":
        return {"type": "output_text", "text": item.content, "annotations": []}
    return {"type": "input_text", "text": item.content}
