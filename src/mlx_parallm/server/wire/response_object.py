"""What `/v1/responses` answers with. Protocol: OpenAI's `Response`, its items, and `ResponseStreamEvent`."""

from __future__ import annotations

from typing import Any, Literal

from mlx_parallm.server.wire.base import WireOutput

ItemStatus = Literal["in_progress", "completed", "incomplete"]
FaultCode = Literal["server_error", "invalid_prompt"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(WireOutput):
    """What the model said."""

    type: Literal["output_text"]
    """Always the same."""
    text: str
    """The text."""
    annotations: list[Any]
    """Always empty."""


class ReasoningText(WireOutput):
    """What the model thought."""

    type: Literal["reasoning_text"]
    """Always the same."""
    text: str
    """The text."""


class OutputMessage(WireOutput):
    """What the model said."""

    id: str
    """Of the item."""
    type: Literal["message"]
    """Names the kind of item."""
    status: ItemStatus
    """Incomplete when the budget cut it."""
    role: Literal["assistant"]
    """Always the same."""
    content: list[OutputText]
    """One text; none yet when an event of a stream adds the item."""


class OutputReasoning(WireOutput):
    """What the model thought before it said or called anything."""

    id: str
    """Of the item."""
    type: Literal["reasoning"]
    """Names the kind of item."""
    status: ItemStatus
    """Incomplete when the budget cut it."""
    summary: list[Any]
    """Always empty: the thought itself is in `content`."""
    content: list[ReasoningText]
    """One text; none yet when an event of a stream adds the item."""


class OutputCall(WireOutput):
    """A function that the client is to call."""

    id: str
    """Of the item."""
    type: Literal["function_call"]
    """Names the kind of item."""
    status: ItemStatus
    """Incomplete when the budget cut it: it is not to be called."""
    call_id: str
    """What the output has to name."""
    name: str
    """Of the function."""
    arguments: str
    """JSON text, or its beginning when incomplete; empty when an event of a stream adds the item."""


OutputItem = OutputReasoning | OutputMessage | OutputCall


class InputTokensDetails(WireOutput):
    """Where the tokens of a prompt came from."""

    cached_tokens: int
    """Tokens that were not computed anew."""
    cache_write_tokens: int
    """Always 0: nothing is charged for."""


class OutputTokensDetails(WireOutput):
    """What the drawn tokens are of."""

    reasoning_tokens: int
    """Tokens of reasoning."""


class ResponseUsage(WireOutput):
    """Tokens of a response."""

    input_tokens: int
    """Tokens of the whole conversation before the answer."""
    input_tokens_details: InputTokensDetails
    """Where they came from."""
    output_tokens: int
    """Tokens drawn."""
    output_tokens_details: OutputTokensDetails
    """What they are of."""
    total_tokens: int
    """Both."""


class ResponseFault(WireOutput):
    """Why a response failed."""

    code: FaultCode
    """`invalid_prompt`: the request must change."""
    message: str
    """What is wrong and what to change."""


class IncompleteDetails(WireOutput):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]
    """The budget, or the context, had no more room."""


class ResponseObject(WireOutput):
    """A response. What the request asked for is told as it was understood."""

    id: str
    """What `previous_response_id` names; the header x-request-id has it too."""
    object: Literal["response"]
    """Always the same."""
    created_at: int
    """Unix time, seconds."""
    status: ResponseStatus
    """`incomplete`: cut by the budget. `failed` and `in_progress` are told in streams alone."""
    error: ResponseFault | None
    """Why it failed."""
    incomplete_details: IncompleteDetails | None
    """Why it is incomplete."""
    model: str
    """The served model, or the adapter's name."""
    lora_adapter: str | None = None
    """`name@version` that served it; absent for the base."""
    output: list[OutputItem]
    """What came out, in order."""
    usage: ResponseUsage | None
    """Tokens; null until it has ended."""
    trajectory_ids: list[str] | None = None
    """One id, when collected."""
    trajectory_warning: str | None = None
    """Why they will not be trained on: a stale version drew them, for one. Absent where they may be."""
    previous_response_id: str | None
    """As it was sent."""
    instructions: str | None
    """As they were sent."""
    max_output_tokens: int | None
    """As it was sent."""
    temperature: float
    """What was drawn at."""
    top_p: float
    """What was drawn with."""
    text: dict[str, Any]
    """How the answer had to look."""
    tools: list[dict[str, Any]]
    """As they were sent."""
    tool_choice: str | dict[str, Any]
    """As it was sent."""
    parallel_tool_calls: bool
    """As it was sent."""
    reasoning: dict[str, Any]
    """The effort, as it was sent."""
    metadata: dict[str, str]
    """As it was sent; empty when collected."""
    store: bool
    """Whether it is kept."""
    background: Literal[False]
    """Always the same."""
    truncation: Literal["auto", "disabled"]
    """As it was sent."""


class ResponseEvent(WireOutput):
    """One event of a stream. It has the fields that OpenAI's event of that `type` has."""

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
    logprobs: list[Any] | None = None

    @property
    def event_name(self) -> str:
        return self.type


class DeletedResponse(WireOutput):
    """A response is forgotten."""

    id: str
    """Of the response."""
    object: Literal["response"]
    """Always the same."""
    deleted: Literal[True]
    """Always the same."""


class InputItems(WireOutput):
    """A part of the items that a response was an answer to."""

    object: Literal["list"]
    """Always the same."""
    data: list[dict[str, Any]]
    """Messages, calls, their outputs and reasoning, those of earlier turns among them."""
    first_id: str | None
    """Of the first item in `data`; null where it is empty."""
    last_id: str | None
    """Of the last one: what `after` takes for the next part."""
    has_more: bool
    """Whether there is a next part."""


class InputTokens(WireOutput):
    """How long the prompt of a response would be."""

    object: Literal["response.input_tokens"]
    """Always the same."""
    input_tokens: int
    """Tokens of the whole conversation, tools and instructions among them."""
