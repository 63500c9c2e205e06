"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.server.wire.base import WireInput, WireOutput, refused
from mlx_parallm.server.wire.common import (
    INT32_MAX,
    FinishReasonText,
    GenerationBody,
    PromptLogprobs,
    TopLogprobs,
    Usage,
)

MAX_MESSAGES = 4096


class TextPart(WireInput):
    type: Literal["text"]
    text: str


def _joined_parts(value: object) -> object:
    """Text parts become one text, a line each."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refused('each part must be {"type": "text", "text": …}: this model reads text alone')
    return "\n".join(part["text"] for part in value)


class Message(WireInput):
    """One turn. What an assistant's turn carries beside text is taken only when it is empty."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_calls": ([],),
        "function_call": (),
        "annotations": ([],),
        "audio": (),
        "refusal": ("",),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=str | list[TextPart])] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise refused("required for this role", "content")
        return self

    def for_template(self) -> dict[str, Any]:
        """What chat templates read. They know no `developer`: it is the newer name of `system`."""
        message = self.model_dump(exclude_none=True) | {"content": self.content or ""}
        return message | {"role": "system"} if self.role == "developer" else message


class TemplateOptions(WireInput):
    """The template variables a client may set: switches that known templates read, and nothing else."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None

    def variables(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(GenerationBody):
    """`max_completion_tokens` is the newer name of `max_tokens`; left out, the rest of the context is used."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.UNSUPPORTED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "chat_template": (),
    }

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateOptions = TemplateOptions()

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
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(WireOutput):
    content: list[ChatTokenLogprob]


class ChatMessage(WireOutput):
    role: Literal["assistant"]
    content: str


class ChatDelta(WireOutput):
    """A choice's first delta has the role; a delta with nothing to say has nothing."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(WireOutput):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonText | None
    stop_reason: str | None = None
    token_ids: list[int] | None = None


class ChatChunkChoice(WireOutput):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonText | None
    stop_reason: str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(WireOutput):
    """The whole answer. `prompt_token_ids` and `prompt_logprobs` are of the rendered template, one for all choices.

    `trajectory_ids`, in order of choice, when collected.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: dict[str, str] | None = None
    lora_adapter: str | None = None
    trajectory_ids: list[str] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(WireOutput):
    """One event of a stream; the first one carries `prompt_token_ids` when asked for, the one with the last
    `finish_reason` `trajectory_ids` when collected."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metadata: dict[str, str] | None = None
    lora_adapter: str | None = None
    trajectory_ids: list[str] | None = None
    prompt_token_ids: list[int] | None = None
