"""The bodies of Ollama's routes. Those that ask for an answer are translated into bodies of chat or of completions."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from mlx_parallm.server.api.chat.messages import MAX_MESSAGES
from mlx_parallm.server.api.chat.tools import MAX_TOOLS, FunctionTool
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, OpenBody, refused
from mlx_parallm.server.api.pooling.fields import MAX_INPUTS, WHOLE_CONTEXT
from mlx_parallm.server.http.body import json_body
from mlx_parallm.server.protocols.ollama.conversation import OllamaMessage, chat_messages
from mlx_parallm.server.protocols.ollama.options import KeepAlive, OllamaOptions, PromptedBody

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


class EmbeddingBody(OpenBody):
    """What both routes for vectors take."""

    model: str | None = None
    """The served model or an adapter, as in chat."""
    options: OllamaOptions = OllamaOptions()
    """Accepted and ignored: no token is drawn."""
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
