"""The bodies of Ollama's routes, and the messages of `POST /api/chat`. Those that ask for an answer are translated into
bodies of chat or of completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mlx_parallm.extras.ollama.options import KeepAlive, OllamaOptions, PromptedBody
from mlx_parallm.server.api.bodies import MAX_INPUTS, WHOLE_CONTEXT
from mlx_parallm.server.api.completions import CompletionBody
from mlx_parallm.server.api.conversation import MAX_CALL_ID, MAX_CALL_NAME, MAX_CALLS, MAX_MESSAGES, CallArguments
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, OpenBody, WireInput, refused
from mlx_parallm.server.api.tools import MAX_TOOLS, FunctionTool
from mlx_parallm.server.body import json_body

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


ollama_body = partial(json_body, media_types=None)
"""As `json_body`, for a body of any content type: some of Ollama's clients name none."""


class OllamaChatBody(PromptedBody):
    """A conversation, and how to continue it."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    """The conversation so far. If the last message is a text of the assistant's, the answer continues it. Without
    messages, the model is loaded, and nothing is generated."""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    """Functions that the model may call."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be generated."""
        return not self.messages

    def for_chat(self) -> dict[str, Any]:
        """The fields of the same request to chat."""
        begun = bool(self.messages) and self.messages[-1].begins_answer
        return {
            **self.chat_fields(),
            "messages": list(chat_messages(self.messages)),
            "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools],
            "add_generation_prompt": not begun,
            "continue_final_message": begun,
        }


class OllamaGenerateBody(PromptedBody):
    """A prompt, and how to answer it."""

    NEUTRAL: ClassVar[Neutral] = {**PromptedBody.NEUTRAL, "context": (), "images": (), "suffix": (), "template": ()}

    prompt: str = ""
    """The prompt. Without it, the model is loaded, and nothing is generated."""
    system: str = ""
    """A system message before the prompt."""
    raw: bool = False
    """Whether the model continues the prompt as it is, without its chat template."""

    @model_validator(mode="after")
    def _check_raw(self) -> Self:
        if self.raw and self.system:
            raise refused("cannot be combined with raw, which uses no chat template", "system")
        return self

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be generated."""
        return not self.prompt

    def for_chat(self) -> dict[str, Any]:
        """The fields of a chat whose last message is the prompt."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.chat_fields(), "messages": [*system, {"role": "user", "content": self.prompt}]}

    def for_completion(self) -> dict[str, Any]:
        """The fields of a completion of the prompt. The system message becomes the text before it."""
        prompt = "\n\n".join(text for text in (self.system, self.prompt) if text)
        return {**self.shared_fields(), "prompt": prompt, "logprobs": self.top}


class RawCompletionBody(CompletionBody):
    """The completion of a prompt. Without a limit, it has as many tokens as a chat."""

    @property
    def default_max_tokens(self) -> None:
        return None


class EmbeddingBody(OpenBody):
    """What both routes for vectors take."""

    model: str | None = None
    """The served model or an adapter, as in chat."""
    options: OllamaOptions = OllamaOptions()
    """Accepted and ignored: no token is sampled."""
    keep_alive: KeepAlive | None = None
    """Accepted and ignored: the model stays in memory."""


class EmbedBody(EmbeddingBody):
    """The texts whose vectors are wanted."""

    input: Annotated[list[str], Field(max_length=MAX_INPUTS)] | str = Field(default_factory=list)
    """A text, or a list of at most 2,048. Each gets one vector. Without texts, the model is loaded."""
    truncate: bool = True
    """Whether a text that is longer than the context is cut at its end. false: it is refused."""
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Only the first so many values of each vector, at length 1 again."""

    def for_embeddings(self) -> dict[str, Any]:
        """The fields of the same request to `/v1/embeddings`."""
        most = WHOLE_CONTEXT if self.truncate else None
        return {"input": self.input, "dimensions": self.dimensions, "truncate_prompt_tokens": most}


class OneEmbeddingBody(EmbeddingBody):
    """The text whose vector is wanted."""

    prompt: str = ""
    """The text, which is cut at its end if it is longer than the context. Without one, the model is loaded."""

    def for_embeddings(self) -> dict[str, Any]:
        """The fields of the same request to `/v1/embeddings`. As Ollama's older route has it, the vector keeps its
        length."""
        return {"input": self.prompt, "truncate_prompt_tokens": WHOLE_CONTEXT, "normalize": False}


class ShowBody(OpenBody):
    """The model to describe: `model`, or its older name `name`."""

    model: str | None = None
    """The served model or an adapter. If it is left out, the served model."""
    name: str | None = None
    """The older name of `model`."""
    verbose: bool = False
    """Accepted and ignored."""
