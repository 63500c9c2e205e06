"""The output items of a response, and the events that they have while they are generated:

reasoning    added, content_part.added, reasoning_text.delta …, reasoning_text.done, content_part.done, done
message      added, content_part.added, output_text.delta …, output_text.done, content_part.done, done
call         added, function_call_arguments.delta …, function_call_arguments.done, done
custom call  added, custom_tool_call_input.delta …, custom_tool_call_input.done, done
"""

from __future__ import annotations

import itertools
import json
import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from mlx_parallm.core.requests import Event, FinishReason, RequestFinished, SequenceOutput
from mlx_parallm.core.splitter import AnswerPart, CallPart, Splitter
from mlx_parallm.errors import ContextLengthError, RequestError
from mlx_parallm.server.api.answer import (
    AnswerWriter,
    RepairedCall,
    Section,
    Sections,
    collected_fields,
    parts_of,
    repaired_fields,
    repetition_fields,
    served_by,
    text_of,
)
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.responses.body import INPUT, OfferedTool, ResponsesBody
from mlx_parallm.server.errors import error_body
from mlx_parallm.server.streams import EVENTS, Framing

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


class _ClientCall(WireOutput):
    """A tool that the client is asked to run."""

    id: str
    """The item's id."""
    type: str
    status: ItemStatus
    """`incomplete` if it was cut off; then it must not be run."""
    call_id: str
    """The id by which the item with the output refers to the call."""
    name: str
    """The tool's name."""
    namespace: str | None = None
    """The namespace of the tool, if it is in one."""


class OutputCall(_ClientCall):
    """A function that the client is asked to run."""

    type: Literal["function_call"]
    arguments: str
    """JSON text, or its beginning if the call is incomplete; empty in the stream's event that adds the item."""


class OutputCustomCall(_ClientCall):
    """A custom tool that the client is asked to run."""

    type: Literal["custom_tool_call"]
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


ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event, and its fields without the sequence number."""


def status_of(cut: bool) -> ItemStatus:
    """The status of an item that has ended. `cut`: it was cut off."""
    return "incomplete" if cut else "completed"


class _OpenItem(Section[OutputItem, ItemEvent]):
    PREFIX: ClassVar[str]
    EVENT: ClassVar[str]
    """The type of the events about its text, without `.delta` and `.done`."""

    def __init__(self, index: int, first: AnswerPart) -> None:
        super().__init__(index, first)
        self.id = new_id(self.PREFIX)
        self.position: dict[str, Any] = {"item_id": self.id, "output_index": index}

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it is now. One that is in progress has no content yet."""

    def begin(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", self._item_fields("in_progress")

    def end(self, cut: bool) -> Iterator[ItemEvent]:
        yield "response.output_item.done", self._item_fields(status_of(cut))

    def whole(self, cut: bool) -> OutputItem:
        return self.item(status_of(cut))

    def _item_fields(self, status: ItemStatus) -> dict[str, Any]:
        return {"output_index": self.index, "item": self.item(status)}


class _OpenText(_OpenItem):
    """An item that consists of one text."""

    EXTRA: ClassVar[dict[str, Any]] = {}
    """Further fields of the events about the text."""

    def __init__(self, index: int, first: AnswerPart) -> None:
        super().__init__(index, first)
        self.position |= {"content_index": 0}

    @abstractmethod
    def content(self) -> OutputText | ReasoningText: ...

    def begin(self) -> Iterator[ItemEvent]:
        yield from super().begin()
        yield "response.content_part.added", {**self.position, "part": self.content()}

    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        if text := text_of(part):
            self._texts.append(text)
            yield f"{self.EVENT}.delta", {**self.position, "delta": text, **self.EXTRA}

    def end(self, cut: bool) -> Iterator[ItemEvent]:
        yield f"{self.EVENT}.done", {**self.position, "text": self.text, **self.EXTRA}
        yield "response.content_part.done", {**self.position, "part": self.content()}
        yield from super().end(cut)


class _OpenReasoning(_OpenText):
    PREFIX, EVENT = "rs", "response.reasoning_text"

    def content(self) -> ReasoningText:
        return ReasoningText(type="reasoning_text", text=self.text)

    def item(self, status: ItemStatus) -> OutputReasoning:
        content = [] if status == "in_progress" else [self.content()]
        return OutputReasoning(id=self.id, type="reasoning", status=status, summary=[], content=content)


class _OpenMessage(_OpenText):
    PREFIX, EVENT, EXTRA = "msg", "response.output_text", {"logprobs": []}

    def content(self) -> OutputText:
        return OutputText(type="output_text", text=self.text, annotations=[])

    def item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self.content()]
        return OutputMessage(id=self.id, type="message", status=status, role="assistant", content=content)


class _OpenCall(_OpenItem):
    PREFIX, EVENT = "fc", "response.function_call_arguments"

    def __init__(self, index: int, first: AnswerPart, tool: OfferedTool) -> None:
        super().__init__(index, first)
        self._tool = tool
        self._complete = False

    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        assert part.call is not None
        self._complete = part.call.complete
        if delta := self._text_of(part.call):
            self._texts.append(delta)
            yield f"{self.EVENT}.delta", {**self.position, "delta": delta}

    def end(self, cut: bool) -> Iterator[ItemEvent]:
        yield f"{self.EVENT}.done", {**self.position, **self._done_fields()}
        yield from super().end(cut)

    def item(self, status: ItemStatus) -> OutputItem:
        """A closed call has a status of its own: it may be complete even if the response was cut off after it."""
        assert self.first.call is not None
        if status != "in_progress":
            status = status_of(not self._complete)
        namespace = {} if self._tool.namespace is None else {"namespace": self._tool.namespace}
        called = {"call_id": self.first.call.call_id, "name": self._tool.name, **namespace}
        return self._output({"id": self.id, "status": status, **called})

    def _text_of(self, call: CallPart) -> str:
        """What the part adds to the text that the client gets."""
        return call.arguments

    def _done_fields(self) -> dict[str, Any]:
        return {"name": self._tool.name, "arguments": self.text}

    def _output(self, fields: dict[str, Any]) -> OutputItem:
        return OutputCall(type="function_call", arguments=self.text, **fields)


class _OpenCustomCall(_OpenCall):
    PREFIX, EVENT = "ctc", "response.custom_tool_call_input"

    def __init__(self, index: int, first: AnswerPart, tool: OfferedTool) -> None:
        super().__init__(index, first, tool)
        self._input = InputText()

    def _text_of(self, call: CallPart) -> str:
        return self._input.add(call.arguments, call.complete)

    def _done_fields(self) -> dict[str, Any]:
        return {"input": self.text}

    def _output(self, fields: dict[str, Any]) -> OutputItem:
        return OutputCustomCall(type="custom_tool_call", input=self.text, **fields)


def _opened(tools: Mapping[str, OfferedTool], index: int, first: AnswerPart) -> _OpenItem:
    """The item that a part begins. `tools`: those that can be called, by the names that the model sees."""
    if first.call is None:
        return (_OpenReasoning if first.reasoning else _OpenMessage)(index, first)
    tool = tools[first.call.name or ""]
    return (_OpenCustomCall if tool.custom else _OpenCall)(index, first, tool)


class InputText:
    """The text for a custom tool, read from the JSON text of the function's arguments while that grows."""

    _BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
    _HIGH, _HEX = r"[dD][89abAB][0-9a-fA-F]{2}", r"[0-9a-fA-F]{4}"
    _CHARACTERS = re.compile(rf'(?:[^"\\]|\\[^u]|\\u{_HIGH}\\u{_HEX}|\\u(?!{_HIGH}){_HEX})*')
    """Whole characters inside a string."""

    def __init__(self) -> None:
        self._arguments = ""
        self._read = 0  # length of the arguments that are read
        self._sent = 0  # length of the text that was returned

    def add(self, arguments: str, complete: bool) -> str:
        """What the next part of the arguments adds to the text. If `complete`, it is the last part."""
        self._arguments += arguments
        added = self._whole()[self._sent :] if complete else self._next_characters()
        self._sent += len(added)
        return added

    def _next_characters(self) -> str:
        if self._read == 0:
            beginning = self._BEGINNING.match(self._arguments)
            self._read = beginning.end() if beginning else 0
        if self._read == 0:
            return ""
        found = self._CHARACTERS.match(self._arguments, self._read)
        assert found is not None
        self._read = found.end()
        return str(json.loads(f'"{found.group()}"'))

    def _whole(self) -> str:
        """The text for the tool; if the model gave other arguments, their JSON text."""
        text = json.loads(self._arguments).get(INPUT)
        return text if isinstance(text, str) else self._arguments


@dataclass(kw_only=True, eq=False)
class ResponseWriter(AnswerWriter):
    """Writes a response. The whole response is the object of the stream's last event, so the two cannot differ.

    `keep` is called with the response when it has ended, before it is sent. `created_at` is Unix time in seconds.
    """

    FRAMING: ClassVar[Framing] = EVENTS

    body: ResponsesBody
    splitter: Splitter
    keep: Callable[[ResponseObject], None]
    created_at: int = field(default_factory=lambda: int(time.time()))
    _items: Sections[OutputItem, ItemEvent] = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)
    _reason: FinishReason | None = field(default=None, init=False)
    _uncounted_tokens: int = field(default=0, init=False)
    _reasoning_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        tools = {tool.function["name"]: tool for tool in self.body.offered()}
        self._items = Sections(partial(_opened, tools))

    def opening_chunks(self) -> Iterator[ResponseEvent]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def chunks(self, event: Event) -> Iterator[ResponseEvent]:
        if isinstance(event, SequenceOutput):
            yield from self._numbered(self._add(event))
        elif isinstance(event, RequestFinished):
            yield from self._closing_events(event)

    def whole(self, events: Sequence[Event]) -> ResponseObject:
        *_, last = (chunk for event in events for chunk in self.chunks(event))
        assert last.response is not None
        return last.response

    def keep_alive(self) -> ResponseEvent:
        """Clients such as Codex measure the silence of a stream between its events, and do not count comments."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    def failed(self, error: Exception) -> ResponseEvent:
        response_error = ResponseError(code=_code_of(error), message=error_body(error).error.message)
        return self._event("response.failed", response=self._response("failed", error=response_error))

    def _add(self, output: SequenceOutput) -> Iterator[ItemEvent]:
        self._uncounted_tokens += len(output.token_ids)
        self._reason = output.finish_reason
        parts = list(parts_of(self.splitter, output))
        self._count_reasoning(parts)
        for part in parts:
            yield from self._items.add(part)

    def _count_reasoning(self, parts: Sequence[AnswerPart]) -> None:
        """Counts the tokens of reasoning. A token that is in no part, such as `<think>`, counts with the next part."""
        if any(part.reasoning for part in parts):
            self._reasoning_tokens += self._uncounted_tokens
        if parts:
            self._uncounted_tokens = 0

    def _closing_events(self, finished: RequestFinished) -> Iterator[ResponseEvent]:
        cut = self._reason is not None and self._reason.cut_off
        yield from self._numbered(self._items.end(cut))
        details = IncompleteDetails(reason="max_output_tokens") if cut else None
        more = {**repetition_fields(self._reason), **collected_fields(self.request, finished)}
        more |= repaired_fields(self.splitter)
        status = status_of(cut)
        response = self._response(status, incomplete_details=details, usage=self._usage(finished), **more)
        self.keep(response)
        yield self._event(f"response.{status}", response=response)

    def _usage(self, finished: RequestFinished) -> ResponseUsage:
        reasoning = self._reasoning_tokens
        return _usage(finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens, reasoning)

    def _response(self, status: ResponseStatus, **more: Any) -> ResponseObject:
        fields = {"id": self.request.request_id, "created_at": self.created_at, "status": status, "usage": None}
        served = served_by(self.request)
        return _response_object(self.body, output=list(self._items.done), **{**fields, **served, **more})

    def _numbered(self, events: Iterator[ItemEvent]) -> Iterator[ResponseEvent]:
        return (self._event(kind, **fields) for kind, fields in events)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)


def empty_response(body: ResponsesBody, model: str) -> ResponseObject:
    """The response to a request without a conversation: nothing was generated."""
    fields = {"id": new_id("resp"), "created_at": int(time.time()), "status": "completed", "usage": _usage(0, 0, 0, 0)}
    return _response_object(body, model=model, output=[], **fields)


def _response_object(body: ResponsesBody, **fields: Any) -> ResponseObject:
    """The response with these fields and those of its request. It has neither failed nor is it incomplete, unless a
    field says so."""
    same = {"object": "response", "error": None, "incomplete_details": None}
    return ResponseObject.model_validate({**same, **body.returned(), **fields})


def _usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached_tokens, cache_write_tokens=0),
        output_tokens=completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
        total_tokens=prompt_tokens + completion_tokens,
    )


def _code_of(error: Exception) -> ErrorCode:
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    return "invalid_prompt" if isinstance(error, RequestError) else "server_error"
