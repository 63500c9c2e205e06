"""The messages of `/v1/messages`: roles and content blocks as Anthropic's clients send them, and the chat messages that
they stand for."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator

from mlx_parallm.server.api.chat.fitting import merged
from mlx_parallm.server.api.chat.messages import CallArguments
from mlx_parallm.server.api.fields import Validate, WireInput, read_nested, refused

ChatMessageFields = dict[str, Any]
"""The fields of a message, as chat's `Message` validates them."""

BILLING_NOTE = "x-anthropic-billing-header"
"""Claude Code puts this line, which differs from request to request, at the beginning of its system prompt. It is left
out, because with it no prompt would begin like an earlier one, and the prefix cache would be of no use."""
ROLES_OF_BLOCKS: Mapping[str, str] = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}
"""The role of the messages that may have a block of a type. A text may be in any message."""


class Block(WireInput):
    """A content block. `cache_control` marks what Anthropic's server should cache; here, all prefixes are cached."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    @abstractmethod
    def message(self, role: str) -> ChatMessageFields:
        """The block as a chat message of its own, in a message of `role`. Empty if it adds nothing to the prompt."""


class TextBlock(Block):
    """A text."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"citations"}

    type: Literal["text"]
    text: str
    """The text."""

    def message(self, role: str) -> ChatMessageFields:
        return {"role": role, "content": self.text}


class ThinkingBlock(Block):
    """The model's reasoning, as an earlier answer had it."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"signature"}

    type: Literal["thinking"]
    thinking: str
    """The reasoning."""

    def message(self, role: str) -> ChatMessageFields:
        return {"role": role, "reasoning_content": self.thinking} if self.thinking else {}


class RedactedThinkingBlock(Block):
    """Reasoning that only another server can read. It adds nothing to the prompt."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"data"}

    type: Literal["redacted_thinking"]

    def message(self, role: str) -> ChatMessageFields:
        return {}


class ToolUseBlock(Block):
    """A tool call that the model made."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"caller"}

    type: Literal["tool_use"]
    id: str
    """The id by which the block with the result refers to the call."""
    name: str
    """The tool's name."""
    input: CallArguments
    """The tool's arguments; at most 64 levels."""

    def message(self, role: str) -> ChatMessageFields:
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"role": role, "tool_calls": [{"id": self.id, "type": "function", "function": function}]}


# ---- reading blocks of a type ----------------------------------------------------------------------


def _block(value: object, info: ValidationInfo, kinds: Mapping[str, type[Block]]) -> Block:
    """A block of one of the `kinds`. The error about any other says what the model cannot read."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise refused('must be a content block, such as {"type": "text", "text": …}')
    if kind in ("image", "document"):
        raise refused(f"this model reads only text; leave the {kind} out, or send what it says as a text block")
    if kind not in kinds:
        raise refused(f"not a supported type of content blocks here; those are {', '.join(kinds)}", "type")
    validate: Validate[Block] = kinds[kind].model_validate
    return read_nested(validate, value, info)


def _text_block(value: object, info: ValidationInfo) -> TextBlock:
    block = _block(value, info, {"text": TextBlock})
    assert isinstance(block, TextBlock)
    return block


def _as_blocks(value: object) -> object:
    """A text becomes a list of one text block."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextBlocks = Annotated[
    list[Annotated[TextBlock, PlainValidator(_text_block, json_schema_input_type=TextBlock)]],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]
"""A text, or a list of text blocks."""


def joined_text(blocks: Iterable[TextBlock]) -> str:
    """The text of all blocks, one block per line, as in chat. Without the note about billing; see `BILLING_NOTE`."""
    return "\n".join(block.text for block in blocks if not block.text.startswith(BILLING_NOTE))


class ToolResultBlock(Block):
    """The result of a tool call."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: str
    """The id of the call."""
    content: TextBlocks = Field(default_factory=list)
    """What the tool returned: a text, or a list of text blocks."""

    def message(self, role: str) -> ChatMessageFields:
        text = "\n".join(block.text for block in self.content)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


BLOCKS: Mapping[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
AnyBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


def _any_block(value: object, info: ValidationInfo) -> Block:
    return _block(value, info, BLOCKS)


Content = Annotated[
    list[Annotated[AnyBlock, PlainValidator(_any_block, json_schema_input_type=AnyBlock)]],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[AnyBlock]),
]


class MessageParam(WireInput):
    """A message of the conversation. Claude Code sends the effort of a turn in `output_config`."""

    IGNORED: ClassVar[frozenset[str]] = Block.IGNORED | {"output_config"}

    role: Literal["user", "assistant", "system"]
    """The author. A message of the role `system` may come anywhere."""
    content: Content
    """A text, or a list of content blocks."""

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        for place, block in enumerate(self.content):
            role = ROLES_OF_BLOCKS.get(block.type, self.role)
            if role != self.role:
                raise refused(f"only messages of the role {role} have such blocks", f"content[{place}]")
        return self

    def chat_messages(self) -> Iterator[ChatMessageFields]:
        """The blocks as chat messages, in order."""
        if self.role == "system":
            yield {"role": "system", "content": joined_text(_texts_of(self.content))}
        else:
            yield from (block.message(self.role) for block in self.content)


def _texts_of(blocks: Iterable[AnyBlock]) -> Iterator[TextBlock]:
    return (block for block in blocks if isinstance(block, TextBlock))


# ---- the whole conversation ------------------------------------------------------------------------


def chat_messages(system: Sequence[TextBlock], messages: Iterable[MessageParam]) -> list[ChatMessageFields]:
    """The conversation as chat messages. Messages of the same role that follow each other become one, as on Anthropic's
    server, but each result of a tool stays a message of its own."""
    first = {"role": "system", "content": joined_text(system)}
    every = [first, *(part for message in messages for part in message.chat_messages())]
    return list(merged(part for part in every if part and part != {"role": "system", "content": ""}))
