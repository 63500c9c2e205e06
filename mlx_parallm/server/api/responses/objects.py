"""The objects that `/v1/responses` answers with: OpenAI's `Response`, its output items, and the events of a stream."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.repairs import RepairedCall

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ErrorCode = Literal["server_error", "invalid_prompt", "context_length_exceeded"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


def new_id(prefix: str) -> str:
    """A unique id of a response or an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputText(WireOutput):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    """The text."""
    annotations: list[Any]
    """Always empty."""


class ReasoningText(WireOutput):
    """The text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str
    """The text."""


class OutputMessage(WireOutput):
    """A message of the model."""

    id: str
    """The item's id."""
    type: Literal["message"]
    status: ItemStatus
    """`incomplete` if it was cut off."""
    role: Literal["assistant"]
    content: list[OutputText]
    """One text; empty in the stream's event that adds the item."""


class OutputReasoning(WireOutput):
    """The model's reasoning before its messages and calls."""

    id: str
    """The item's id."""
    type: Literal["reasoning"]
    status: ItemStatus
    """`incomplete` if it was cut off."""
    summary: list[Any]
    """Always empty: the whole reasoning is in `content`."""
    content: list[ReasoningText]
    """One text; empty in the stream's event that adds the item."""


class OutputCall(WireOutput):
    """A function that the client is asked to run."""

    id: str
    """The item's id."""
    type: Literal["function_call"]
    status: ItemStatus
    """`incomplete` if it was cut off; then the function must not be run."""
    call_id: str
    """The id by which the item with the output refers to the call."""
    name: str
    """The function's name."""
    namespace: str | None = None
    """The namespace of the function, if it is in one."""
    arguments: str
    """JSON text, or its beginning if the call is incomplete; empty in the stream's event that adds the item."""


class OutputCustomCall(WireOutput):
    """A custom tool that the client is asked to run."""

    id: str
    """The item's id."""
    type: Literal["custom_tool_call"]
    status: ItemStatus
    """`incomplete` if it was cut off; then the tool must not be run."""
    call_id: str
    """The id by which the item with the output refers to the call."""
    name: str
    """The tool's name."""
    namespace: str | None = None
    """The namespace of the tool, if it is in one."""
    input: str
    """The text for the tool, or its beginning if the call is incomplete; empty in the stream's event that adds the
    item."""


OutputItem = OutputReasoning | OutputMessage | OutputCall | OutputCustomCall


class InputTokensDetails(WireOutput):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Prompt tokens whose keys and values were taken from the prefix cache and not computed."""
    cache_write_tokens: int
    """Always 0."""


class OutputTokensDetails(WireOutput):
    """Details of the generated tokens."""

    reasoning_tokens: int
    """Tokens of reasoning."""


class ResponseUsage(WireOutput):
    """The number of tokens in a request and its response."""

    input_tokens: int
    """Tokens of the prompt: the whole conversation before the response."""
    input_tokens_details: InputTokensDetails
    """How many of them were cached."""
    output_tokens: int
    """Tokens generated."""
    output_tokens_details: OutputTokensDetails
    """How many of them are reasoning."""
    total_tokens: int
    """The sum of both."""


class ResponseError(WireOutput):
    """Why a response failed."""

    code: ErrorCode
    """`context_length_exceeded` if the conversation is too long, `invalid_prompt` if the request must change in another
    way, and `server_error` otherwise."""
    message: str
    """What is wrong and what to change."""


class IncompleteDetails(WireOutput):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]
    """The token limit, or the end of the context, was reached, or the response repeated itself without end."""


class ResponseObject(WireOutput):
    """A response, with the fields of its request as the server understood them."""

    id: str
    """The id to send as `previous_response_id`. It is also in the header x-request-id."""
    object: Literal["response"]
    created_at: int
    """Unix time in seconds."""
    status: ResponseStatus
    """`incomplete` if it was cut off. `failed` and `in_progress` appear only in streams."""
    error: ResponseError | None
    """Why it failed."""
    incomplete_details: IncompleteDetails | None
    """Why it is incomplete."""
    finish_reason: Literal["repetition"] | None = None
    """`repetition`: it is incomplete because it repeated itself without end."""
    model: str
    """The served model, or the adapter's name."""
    lora_adapter: str | None = None
    """`name@version` of the adapter; absent for the base."""
    output: list[OutputItem]
    """Reasoning, messages and calls, in order."""
    usage: ResponseUsage | None
    """Numbers of tokens; null until the response has ended."""
    trajectory_ids: list[str] | None = None
    """One id, with `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectory will not be used for training, for example because a stale version sampled it."""
    repaired_tool_calls: list[RepairedCall] | None = None
    """The calls that were repaired; absent if none was."""
    previous_response_id: str | None
    """From the request."""
    instructions: str | None
    """From the request."""
    max_output_tokens: int | None
    """From the request."""
    temperature: float
    """From the request."""
    top_p: float
    """From the request."""
    text: dict[str, Any]
    """From the request."""
    tools: list[dict[str, Any]]
    """From the request."""
    tool_choice: str | dict[str, Any]
    """From the request."""
    parallel_tool_calls: bool
    """From the request."""
    reasoning: dict[str, Any]
    """From the request."""
    metadata: dict[str, str]
    """From the request; empty with `collect_trajectory`."""
    store: bool
    """Whether the response is kept."""
    background: Literal[False]
    truncation: Literal["auto", "disabled"]
    """From the request."""


class ResponseEvent(WireOutput):
    """One event of a stream. It has the fields of OpenAI's event of the same `type`."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    logprobs: list[Any] | None = None

    @property
    def event_name(self) -> str:
        return self.type


class DeletedResponse(WireOutput):
    """The response was deleted."""

    id: str
    """The response's id."""
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(WireOutput):
    """A page of a response's input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    """Messages, calls, outputs and reasoning, including those of earlier turns."""
    first_id: str | None
    """The id of the first item in `data`; null if it is empty."""
    last_id: str | None
    """The id of the last item in `data`: send it as `after` for the next page."""
    has_more: bool
    """Whether there is a next page."""


class InputTokens(WireOutput):
    """The length of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int
    """Tokens of the whole conversation, including tools and instructions."""
