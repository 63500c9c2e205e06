"""What Ollama's routes answer with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from mlx_parallm.server.api.answer import RepairedCall
from mlx_parallm.server.api.fields import Numbers, WireOutput
from mlx_parallm.server.api.logprobs import ChatTokenLogprob


def timestamp(unix_s: float) -> str:
    """The time as Ollama writes it, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


# ---- answers -----------------------------------------------------------------------------------------


class AnsweredFunction(WireOutput):
    """A function with its arguments."""

    name: str
    """The function's name."""
    arguments: dict[str, Any]
    """Its arguments. If the token limit cut the call off, those that were written before."""


class AnsweredCall(WireOutput):
    """A tool that the client is asked to run."""

    id: str
    """The id by which the message with the result may refer to the call."""
    function: AnsweredFunction
    """The function that is called."""


class AnsweredMessage(WireOutput):
    """The assistant's message, or what a line adds to it."""

    role: Literal["assistant"]
    content: str
    """The text."""
    thinking: str | None = None
    """The reasoning before the answer, for models that mark it."""
    tool_calls: list[AnsweredCall] | None = None
    """The functions that the model calls. In a stream, each call comes whole."""


class Stamped(WireOutput):
    """The fields at the beginning of every answer and of every line."""

    model: str
    """The served model, or the adapter's name."""
    lora_adapter: str | None = None
    """The adapter version that served the request."""
    created_at: str
    """The time, in UTC."""


class MessageHolder(Stamped):
    """An answer that is a message."""

    message: AnsweredMessage
    """The message, or what a line adds to it."""


class ResponseHolder(Stamped):
    """An answer that is a text."""

    response: str
    """The text, or what a line adds to it."""
    thinking: str | None = None
    """The reasoning before the answer, for models that mark it."""


class Ending(WireOutput):
    """The fields at the end of every answer and of every line. Those after `done` are only in the last line. Times are
    in nanoseconds."""

    LONG: ClassVar[bool] = True

    logprobs: list[ChatTokenLogprob] | None = None
    """Logprobs of the generated tokens, if the request asked for them."""
    done: bool
    """Whether the answer has ended."""
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    """Why the answer ended. `load` and `unload`: the request had no prompt."""
    finish_reason: Literal["repetition"] | None = None
    """`repetition`: the answer repeated itself without end; `done_reason` is `length` then."""
    total_duration: int | None = None
    """From the arrival of the request to the end of the answer."""
    load_duration: int | None = None
    """From the arrival to the beginning of the prompt's computation."""
    prompt_eval_count: int | None = None
    """Tokens of the prompt."""
    prompt_eval_duration: int | None = None
    """From the beginning of the prompt's computation to the first token."""
    eval_count: int | None = None
    """Tokens generated, including reasoning and calls."""
    eval_duration: int | None = None
    """From the first token to the end."""
    trajectory_ids: list[str] | None = None
    """One id, with `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectory will not be used for training, for example because a stale version sampled it."""
    repaired_tool_calls: list[RepairedCall] | None = None
    """The calls that were repaired; absent if none was."""


class ChatAnswer(Ending, MessageHolder):
    """The whole answer of `/api/chat`, or one line of a stream."""


class GenerateAnswer(Ending, ResponseHolder):
    """The whole answer of `/api/generate`, or one line of a stream."""


class EmbedAnswer(WireOutput):
    """The vectors of all texts, in their order. Times are in nanoseconds."""

    LONG: ClassVar[bool] = True

    model: str
    """The served model, or the adapter's name."""
    embeddings: list[Numbers]
    """One vector of length 1 for each text."""
    total_duration: int | None = None
    """From the arrival of the request to the end."""
    load_duration: int | None = None
    """From the arrival to the beginning of the computation."""
    prompt_eval_count: int | None = None
    """Tokens of all texts."""


class OneEmbeddingAnswer(WireOutput):
    """The vector of one text."""

    embedding: list[float]
    """The vector, whose length is not 1."""


# ---- models ------------------------------------------------------------------------------------------


class ModelDetails(WireOutput):
    """What kind of model it is."""

    parent_model: str
    """For an adapter, the base model's name; else empty."""
    format: Literal["mlx"]
    family: str
    """The model's family, such as `llama`. This and the rest is empty for a base model that was not loaded yet."""
    families: list[str]
    """The same, as a list."""
    parameter_size: str
    """The number of parameters, such as `134.5M`."""
    quantization_level: str
    """The quantization of the weights, or their type."""


class ListedModel(WireOutput):
    """One name that `model` accepts."""

    name: str
    """The name."""
    model: str
    """The name again."""
    modified_at: str | None = None
    """When the adapter was made, or the server started. Absent in `/api/ps`."""
    size: int
    """Bytes of the weights, of an adapter alone if it is one; 0 for a base model that was not loaded yet."""
    digest: str
    """64 hex digits that stand for this version of the model. They are made of its names and not of its files."""
    details: ModelDetails
    """Its family, size and quantization."""
    expires_at: str | None = None
    """Only in `/api/ps`: a time in the far future, because models stay in memory."""
    size_vram: int | None = None
    """Only in `/api/ps`: the same as `size`."""
    context_length: int | None = None
    """Only in `/api/ps`: maximum number of tokens of prompt and answer together."""


class ListedModels(WireOutput):
    """Models."""

    models: list[ListedModel]
    """The base model first."""


Capability = Literal["completion", "tools", "thinking", "embedding"]


class ShownModel(WireOutput):
    """A description of one model."""

    details: ModelDetails
    """Its family, size and quantization."""
    model_info: dict[str, str | int]
    """`general.architecture`, `general.parameter_count` and, by the name of the architecture, `.context_length`."""
    capabilities: list[Capability]
    """`tools`: it has a chat template, so it can be told about tools. `thinking`: it marks its reasoning."""
    template: str
    """The chat template, in Jinja; empty if there is none."""
    parameters: str
    """The context's length and the model's own sampling defaults, one on each line."""
    modified_at: str
    """When the adapter was made, or the server started."""


class OllamaVersion(WireOutput):
    """The version of Ollama whose API this server has."""

    version: str
    """Clients compare it with the version that they need."""
