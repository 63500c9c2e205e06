"""The bodies of `POST /v1/messages` and of `/v1/messages/count_tokens`: Anthropic's Messages API for a server that does
not run tools itself. Their messages have roles and content blocks as Anthropic's clients send them.

A body is translated into a chat body, which is validated too, so both routes have the same limits.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator

from mlx_parallm.server.api.bodies import Schema, SharedBody, Stops
from mlx_parallm.server.api.chat import ChatBody
from mlx_parallm.server.api.conversation import MAX_MESSAGES, CallArguments, merged
from mlx_parallm.server.api.fields import INT32_MAX, IgnoredFields, Neutral, WireInput, read_nested, refused
from mlx_parallm.server.api.tools import MAX_TOOLS

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
    return read_nested(kinds[kind], value, info)


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


CHAT_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Chat's names of the tool choices that name no tool."""


class Tool(WireInput):
    """A tool that the client runs."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
    )

    type: Literal["custom"] = "custom"
    """May be left out."""
    name: str
    """The tool's name."""
    description: str | None = None
    """What the tool does, for the model."""
    input_schema: dict[str, Any]
    """The JSON schema of its arguments."""
    strict: bool | None = None
    """If one tool is strict, the arguments of all calls follow their schemas."""

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": function | {"description": self.description}}


def _runs_on_a_server(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and value.get("type") not in (None, "custom")


def _client_tools(value: object, info: ValidationInfo) -> object:
    """The tools without those that Anthropic's server runs or describes to its models. They count as ignored fields."""
    if not isinstance(value, list) or not isinstance(info.context, IgnoredFields):
        return value
    for tool in filter(_runs_on_a_server, value):
        info.context.add(f"tools.{tool['type']}"[:100], ())
    return [tool for tool in value if not _runs_on_a_server(tool)]


class ToolChoice(WireInput):
    """Which tools the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto`: the model may call tools. `any`: it must call one or more. `tool`: it must call the tool `name`. `none`:
    it does not see the tools."""
    name: str | None = None
    """With the type `tool`: the name of one of `tools`."""
    disable_parallel_tool_use: bool = False
    """Whether an answer has at most one call."""

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise refused('is required with type "tool", and refused with any other', "name")
        return self

    def for_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return CHAT_CHOICES[self.type]


class Thinking(WireInput):
    """Whether the model reasons before it answers, if its chat template has a switch for that."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Annotated[str, Field(max_length=32)]
    """`disabled` turns reasoning off; any other value, such as `enabled` or `adaptive`, turns it on."""
    budget_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """The most tokens of reasoning. It has no effect if the model does not mark its reasoning, and with
    `collect_trajectory`."""


class OutputFormat(WireInput):
    """The format that the text of the answer follows."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")
    """The JSON schema of the answer."""

    def for_chat(self) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema_}}


class OutputConfig(WireInput):
    """Settings of the answer."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"task_budget"})

    format: OutputFormat | None = None
    """The format that the text follows. Without it, the text is free."""
    effort: str | None = None
    """Chat's `reasoning_effort`."""


class ConversationBody(SharedBody):
    """A conversation, as both routes take it."""

    IGNORED: ClassVar[frozenset[str]] = SharedBody.IGNORED | {
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "speed",
    }
    NEUTRAL: ClassVar[Neutral] = {}

    metadata: dict[str, Any] | None = None
    """Its `user_id` has the meaning of `user`. With `collect_trajectory`, any JSON of at most 64 KiB and 32 levels, for
    the scorer, as in chat."""
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation so far. If the last message is the assistant's, the answer continues its text."""
    thread: dict[str, Any] | None = None
    """A conversation that a server keeps. This server keeps none: with another `type` than `create`, the answer is an
    error after which Anthropic's SDK sends the whole conversation."""
    system: TextBlocks = Field(default_factory=list)
    """A system message before all others: a text, or a list of text blocks."""
    tools: Annotated[list[Tool], BeforeValidator(_client_tools), Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )
    """Tools that the model may call and the client runs. Others, such as `web_search_20250305`, are left out, and the
    header `x-ignored-fields` names them."""
    tool_choice: ToolChoice = ToolChoice(type="auto")
    """Whether the answer may or must call tools. If it is left out, it may."""
    thinking: Thinking | None = None
    """Whether the model reasons before it answers. If it is left out, the chat template decides."""
    output_config: OutputConfig = OutputConfig()
    """The format of the answer."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    """Sample from this many most likely tokens; 0 and -1 are off."""
    stop_sequences: Stops = Field(default_factory=list)
    """Texts. The answer ends before the first one that the model writes."""

    def for_chat(self) -> dict[str, Any]:
        """The same request as the fields of a chat body."""
        same = self.model_dump(include={*SharedBody.model_fields, "top_k"} - {"metadata"}, exclude_unset=True)
        metadata, begun = self.metadata or {}, self.messages[-1].role == "assistant"
        output = self.output_config
        return {
            **({"user": metadata.get("user_id")} if isinstance(metadata.get("user_id"), str) else {}),
            **same,
            # A client's metadata is about the user. Only a scorer needs it as it is.
            "metadata": metadata if self.collect_trajectory else None,
            "messages": chat_messages(self.system, self.messages),
            "add_generation_prompt": not begun,
            "continue_final_message": begun,
            "stop": self.stop_sequences,
            "tools": [tool.for_chat() for tool in self.tools] or None,
            "tool_choice": self.tool_choice.for_chat() if "tool_choice" in self.model_fields_set else None,
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "response_format": output.format.for_chat() if output.format else None,
            "reasoning_effort": output.effort,
            "chat_template_kwargs": self._template_options(),
            "thinking_token_budget": self._thinking_budget(),
        }

    def _thinking_budget(self) -> int | None:
        """Clients send a budget with every request, so none is refused."""
        applies = self.thinking is not None and self.thinking.type != "disabled" and not self.collect_trajectory
        return self.thinking.budget_tokens if self.thinking is not None and applies else None

    def _template_options(self) -> dict[str, bool] | None:
        """The switch of the chat template for reasoning, under the names that model families have for it."""
        if self.thinking is None:
            return None
        thinks = self.thinking.type != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks}


class MessagesChat(ChatBody):
    """The same conversation as a chat body."""

    most_tokens: int | None = None
    """Maximum number of tokens to generate. If fewer fit the context, those, also with `collect_trajectory`."""

    @property
    def default_max_tokens(self) -> int | None:
        return self.most_tokens


class CountTokensBody(ConversationBody):
    """A conversation whose tokens are to be counted."""

    IGNORED: ClassVar[frozenset[str]] = ConversationBody.IGNORED | {"max_tokens"}


class MessagesBody(ConversationBody):
    """A conversation, and how to answer it."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    """Maximum number of tokens to generate, including reasoning and calls. If fewer fit the context, those."""

    def for_chat(self) -> dict[str, Any]:
        return {**super().for_chat(), "most_tokens": self.max_tokens}
