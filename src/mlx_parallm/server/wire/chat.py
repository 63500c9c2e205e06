"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mlx_parallm.server.wire.base import WireOutput, refused
from mlx_parallm.server.wire.common import (
    COLLECTION_RULE,
    INT32_MAX,
    NO_LIMIT,
    FinishReasonText,
    GenerationBody,
    PromptLogprobs,
    TopLogprobs,
    Usage,
)
from mlx_parallm.server.wire.messages import Messages, TemplateOptions
from mlx_parallm.server.wire.neutral import CHAT, Neutral
from mlx_parallm.server.wire.tools import Call, CallDelta, NamedTool, ToolChoice, Tools


class ChatBody(GenerationBody):
    """A conversation, and what its next turn may be."""

    NEUTRAL: ClassVar[Neutral] = {**CHAT, "max_tokens": (NO_LIMIT,), "max_completion_tokens": (NO_LIMIT,)}

    messages: Messages
    """The conversation."""
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Tokens to draw at most; left out or -1: all that fit."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    """Logprobs of the drawn tokens."""
    top_logprobs: TopLogprobs = 0
    """And of so many best ones at each place."""
    add_generation_prompt: bool = True
    """Whether the prompt ends where the assistant begins."""
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    """Switches of the chat template."""
    tools: Tools = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: ToolChoice = "auto"
    """`none`: the model is told of no tool. `auto`: it may call. `required`: it calls one or more. An object: it calls
    that one."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""

    @property
    def calls(self) -> bool:
        """Whether an answer may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def compiles(self) -> bool:
        calls = self.calls and (self.tool_choice != "auto" or any(tool.function.strict for tool in self.tools))
        return calls or super().compiles

    @model_validator(mode="after")
    def _chooses_tools(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise refused("two functions have the same name", "tools")
        if isinstance(self.tool_choice, NamedTool):
            if self.tool_choice.function.name not in names:
                raise refused("names no function of tools", "tool_choice")
        elif self.tool_choice == "required" and not names:
            raise refused("needs tools", "tool_choice")
        if self.calls:
            self._check_calls()
        return self

    def _check_calls(self) -> None:
        enforced = "tool_choice" if self.tool_choice != "auto" else "tools"
        if self.tool_choice == "auto" and not any(tool.function.strict for tool in self.tools):
            return
        if self.collect_trajectory:
            raise refused(f"not enforced with collect_trajectory: {COLLECTION_RULE}; leave it out", enforced)
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise refused(f"not with {enforced}, which says where the text ends; leave it out", name)

    @model_validator(mode="after")
    def _fits_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise refused("needs logprobs: true", "top_logprobs")
        if self.stream and self.prompt_logprobs is not None:
            raise refused("not available with stream", "prompt_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise refused("differs from max_completion_tokens, its newer name; send one", "max_tokens")
        return self


class ChatTopLogprob(WireOutput):
    """A token that might come at one place."""

    token: str
    """Its text, or `token_id:<id>`."""
    logprob: float
    """Nats, of the raw model."""
    bytes: list[int]
    """What it spells, exactly."""


class ChatTokenLogprob(ChatTopLogprob):
    """The token that came."""

    top_logprobs: list[ChatTopLogprob]
    """The best ones at its place."""


class ChatLogprobs(WireOutput):
    """Of all tokens, those of reasoning and calls among them."""

    LONG: ClassVar[bool] = True

    content: list[ChatTokenLogprob]
    """In order."""


class ChatMessage(WireOutput):
    """An answer."""

    role: Literal["assistant"]
    """Always the same."""
    content: str | None
    """What is said; null where there are calls or reasoning alone."""
    reasoning_content: str | None = None
    """What was thought before, for models that mark it."""
    reasoning: str | None = None
    """The same, by vLLM's name."""
    tool_calls: list[Call] | None = None
    """Functions that the model calls."""


class ChatDelta(WireOutput):
    """A choice's first delta has the role; a delta with nothing to say has nothing."""

    role: Literal["assistant"] | None = None
    """With the first chunk of a choice."""
    content: str | None = None
    """More of what is said."""
    reasoning_content: str | None = None
    """More of what is thought."""
    reasoning: str | None = None
    """The same, by vLLM's name."""
    tool_calls: list[CallDelta] | None = None
    """More of the calls."""


ChatFinishReason = FinishReasonText | Literal["tool_calls"]
"""`tool_calls`: the model has called, of its own or because it had to call any; after a call by name it is `stop`."""


class ChatChoice(WireOutput):
    """One answer."""

    LONG: ClassVar[bool] = True

    index: int
    """Which of the `n`."""
    message: ChatMessage
    """What it says."""
    logprobs: ChatLogprobs | None
    """When asked for."""
    finish_reason: ChatFinishReason | None
    """Why it ended."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    token_ids: list[int] | None = None
    """Of the tokens drawn."""


class ChatChunkChoice(WireOutput):
    """What a chunk adds to one answer."""

    index: int
    """Which of the `n`."""
    delta: ChatDelta
    """More of it."""
    logprobs: ChatLogprobs | None
    """Of the tokens of this chunk, when asked for."""
    finish_reason: ChatFinishReason | None
    """Why it ended; null while it goes on."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    token_ids: list[int] | None = None
    """Of the tokens drawn."""


class ChatCompletion(WireOutput):
    """The whole answer."""

    LONG: ClassVar[bool] = True

    id: str
    """Of the request; the header x-request-id has it too."""
    object: Literal["chat.completion"]
    """Always the same."""
    created: int
    """Unix time, seconds."""
    model: str
    """The served model, or the adapter's name."""
    choices: list[ChatChoice]
    """The `n` answers."""
    usage: Usage
    """Tokens."""
    metadata: dict[str, str] | None = None
    """As it was sent."""
    lora_adapter: str | None = None
    """`name@version` that served it; absent for the base."""
    trajectory_ids: list[str] | None = None
    """In order of choice, when collected."""
    trajectory_warning: str | None = None
    """Why they will not be trained on: a stale version drew them, for one. Absent where they may be."""
    prompt_token_ids: list[int] | None = None
    """Of the rendered template, one for all choices."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the rendered template, an entry for each token; null for the first."""


class ChatCompletionChunk(WireOutput):
    """One event of a stream."""

    id: str
    """Of the request."""
    object: Literal["chat.completion.chunk"]
    """Always the same."""
    created: int
    """Unix time, seconds."""
    model: str
    """The served model, or the adapter's name."""
    choices: list[ChatChunkChoice]
    """The one that it adds to, or none."""
    usage: Usage | None = None
    """As `stream_options` says."""
    metadata: dict[str, str] | None = None
    """As it was sent."""
    lora_adapter: str | None = None
    """`name@version` that served it; absent for the base."""
    trajectory_ids: list[str] | None = None
    """When collected, with the last `finish_reason`."""
    trajectory_warning: str | None = None
    """Why they will not be trained on: a stale version drew them, for one. Absent where they may be."""
    prompt_token_ids: list[int] | None = None
    """With the first chunk, when asked for."""
