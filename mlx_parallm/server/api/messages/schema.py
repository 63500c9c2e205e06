"""The bodies of `POST /v1/messages` and of `/v1/messages/count_tokens`: Anthropic's Messages API for a server that does
not run tools itself.

A body is translated into a chat body, which is validated too, so both routes have the same limits.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeGuard

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from mlx_parallm.server.api.chat.messages import MAX_MESSAGES
from mlx_parallm.server.api.chat.tools import MAX_TOOLS
from mlx_parallm.server.api.fields import INT32_MAX, IgnoredFields, Neutral, WireInput, refused
from mlx_parallm.server.api.generation_fields import SharedBody
from mlx_parallm.server.api.grammar_fields import Schema
from mlx_parallm.server.api.messages.content import MessageParam, TextBlocks, chat_messages
from mlx_parallm.server.api.sampling_fields import Stops

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

    IGNORED: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    type: Annotated[str, Field(max_length=32)]
    """`disabled` turns reasoning off; any other value, such as `enabled` or `adaptive`, turns it on."""


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
        """The same request as a chat body."""
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
        }

    def _template_options(self) -> dict[str, bool] | None:
        """The switch of the chat template for reasoning, under the names that model families have for it."""
        if self.thinking is None:
            return None
        thinks = self.thinking.type != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks}


class CountTokensBody(ConversationBody):
    """A conversation whose tokens are to be counted."""

    IGNORED: ClassVar[frozenset[str]] = ConversationBody.IGNORED | {"max_tokens"}


class MessagesBody(ConversationBody):
    """A conversation, and how to answer it."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    """Maximum number of tokens to generate, including reasoning and calls. If fewer fit the context, those."""
