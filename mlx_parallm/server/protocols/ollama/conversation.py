"""The messages of `POST /api/chat`, and the chat messages that they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_parallm.server.api.chat.messages import MAX_CALL_ID, MAX_CALL_NAME, MAX_CALLS, CallArguments
from mlx_parallm.server.api.fields import Neutral, WireInput

ChatMessageFields = dict[str, Any]
"""The fields of a message, as chat's `Message` validates them."""
CallId = Annotated[str, Field(max_length=MAX_CALL_ID)]


class OllamaFunction(WireInput):
    """The function that an earlier message called."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"index"})

    name: Annotated[str, Field(min_length=1, max_length=MAX_CALL_NAME)]
    """The function's name."""
    arguments: CallArguments = Field(default_factory=dict)
    """Its arguments; at most 64 levels."""


class OllamaCall(WireInput):
    """A tool call in an earlier message of the assistant."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"type"})

    id: CallId | None = None
    """The id from the assistant's answer. Older clients do not send it."""
    function: OllamaFunction
    """The function that was called."""

    def for_chat(self, own_id: str) -> dict[str, Any]:
        """The call as chat has it. `own_id`: its id if the client sent none."""
        arguments = json.dumps(self.function.arguments, ensure_ascii=False)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or own_id, "type": "function", "function": function}


class OllamaMessage(WireInput):
    """One message of the conversation."""

    NEUTRAL: ClassVar[Neutral] = {"images": ()}

    role: Literal["system", "user", "assistant", "tool"]
    """The author of the message."""
    content: str = ""
    """The text."""
    thinking: str | None = None
    """The assistant's reasoning, as an earlier answer had it."""
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    """The calls that the assistant made."""
    tool_name: Annotated[str, Field(max_length=MAX_CALL_NAME)] | None = None
    """For a message of a tool: the name of the function whose result it contains."""
    tool_call_id: CallId | None = None
    """For a message of a tool: the id of the call whose result it contains."""

    @property
    def begins_answer(self) -> bool:
        """Whether the answer continues this message, if it is the last one."""
        return self.role == "assistant" and not self.tool_calls


def chat_messages(messages: Sequence[OllamaMessage]) -> Iterator[ChatMessageFields]:
    """The conversation as chat messages. Calls without an id get one. A result without the id of its call belongs to
    the first call of the last answer that has that name and no result yet, or else to the first without a result; it
    has no id if there is none."""
    waiting: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        fields: ChatMessageFields = {"role": message.role, "content": message.content}
        if message.tool_calls:
            waiting = [call.for_chat(f"call_{place}_{index}") for index, call in enumerate(message.tool_calls)]
            fields["tool_calls"] = list(waiting)
        if message.role == "tool":
            fields |= {"tool_call_id": _answered(message, waiting), "name": message.tool_name}
        yield {**fields, "reasoning_content": message.thinking}


def _answered(result: OllamaMessage, waiting: list[dict[str, Any]]) -> str:
    """The id of the call that a result belongs to. That call is removed from those that are `waiting`."""
    matching = (
        [call for call in waiting if call["id"] == result.tool_call_id]
        or [call for call in waiting if call["function"]["name"] == result.tool_name]
        or waiting
    )
    found = result.tool_call_id
    if found is None:
        found = str(matching[0]["id"]) if matching else ""
    waiting[:] = [call for call in waiting if call["id"] != found]
    return found
