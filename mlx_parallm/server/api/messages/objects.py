"""What `/v1/messages` answers with: Anthropic's `Message`, its content blocks, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.repairs import RepairedCall

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(WireOutput):
    """A text."""

    type: Literal["text"]
    text: str
    """The text; empty in the event that starts the block."""


class ThinkingContent(WireOutput):
    """The model's reasoning before its texts and calls."""

    type: Literal["thinking"]
    thinking: str
    """The reasoning; empty in the event that starts the block."""
    signature: Literal[""]
    """Always empty: the block can be sent back without one."""


class ToolUseContent(WireOutput):
    """A tool that the client is asked to run."""

    type: Literal["tool_use"]
    id: str
    """The id by which the block with the result refers to the call."""
    name: str
    """The tool's name."""
    input: dict[str, Any]
    """The tool's arguments. If the token limit cut the call off, those that were written before. Empty in the event
    that starts the block."""


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(WireOutput):
    """The number of tokens in a request and its answer. The prompt's tokens are the sum of the first three."""

    input_tokens: int
    """Tokens of the prompt that were computed. In the event `message_start`, all tokens of the prompt."""
    cache_creation_input_tokens: int | None = None
    """Always 0."""
    cache_read_input_tokens: int | None = None
    """Tokens of the prompt whose keys and values were taken from the prefix cache."""
    output_tokens: int
    """Tokens generated."""


class MessageObject(WireOutput):
    """A message of the model."""

    id: str
    """The message's id."""
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    """The served model, or the adapter's name."""
    lora_adapter: str | None = None
    """`name@version` of the adapter; absent for the base."""
    content: list[ContentBlock]
    """Reasoning, texts and calls, in order: at least one block, and none in the event `message_start`."""
    stop_reason: StopReason | None
    """Why the message ended: the model ended it, it was cut off (by the limit, the end of the context, or because it
    repeated itself), one of `stop_sequences` came, or tools were called. Null in the event `message_start`."""
    stop_sequence: str | None
    """The stop sequence that ended the message."""
    finish_reason: Literal["repetition"] | None = None
    """`repetition`: the message repeated itself without end; `stop_reason` is `max_tokens` then."""
    usage: MessageUsage
    """Numbers of tokens."""
    trajectory_ids: list[str] | None = None
    """One id, with `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectory will not be used for training, for example because a stale version sampled it."""
    repaired_tool_calls: list[RepairedCall] | None = None
    """The calls that were repaired; absent if none was."""


class BlockDelta(WireOutput):
    """What an event adds to a block: the field that belongs to its type."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str | None = None
    """More text."""
    thinking: str | None = None
    """More reasoning."""
    signature: str | None = None
    """The signature of the reasoning: always empty."""
    partial_json: str | None = None
    """More of the JSON text of a tool's arguments."""


class MessageEnd(WireOutput):
    """How the message ended."""

    stop_reason: StopReason
    """See the message's field."""
    stop_sequence: str | None
    """See the message's field."""
    finish_reason: Literal["repetition"] | None = None
    """See the message's field."""


class MessageEvent(WireOutput):
    """One event of a stream. It has the fields of Anthropic's event of the same `type`."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
    message: MessageObject | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: BlockDelta | MessageEnd | None = None
    usage: MessageUsage | None = None
    trajectory_ids: list[str] | None = None
    trajectory_warning: str | None = None
    repaired_tool_calls: list[RepairedCall] | None = None

    @property
    def event_name(self) -> str:
        return self.type


class TokenCount(WireOutput):
    """The length of a prompt."""

    input_tokens: int
    """Tokens of the whole conversation, including tools and the system message."""
