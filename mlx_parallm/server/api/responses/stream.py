"""Turns the engine's events into a response: one object, or a stream of typed, numbered events.

The output items of a response have these events while they are generated:

    reasoning  added, content_part.added, reasoning_text.delta …, reasoning_text.done, content_part.done, done
    message    added, content_part.added, output_text.delta …, output_text.done, content_part.done, done
    call       added, function_call_arguments.delta …, function_call_arguments.done, done

One item is open at a time. A part of the answer that does not belong to it ends it.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlx_parallm.core import Event, FinishReason, GenerationRequest, RequestFinished, SequenceOutput
from mlx_parallm.core.splitter import AnswerPart, Splitter
from mlx_parallm.errors import RequestError
from mlx_parallm.server.api.answer import AnswerWriter, Watch, collected_fields, cut_off, served_by
from mlx_parallm.server.api.responses.objects import (
    ErrorCode,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
    new_id,
)
from mlx_parallm.server.api.responses.schema import ResponsesBody
from mlx_parallm.server.errors import error_body

ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event, and its fields without the sequence number."""


class OutputItems:
    """The items of one response: those that are `done`, and the open one."""

    def __init__(self) -> None:
        self.done: list[OutputItem] = []
        self._open: _OpenItem | None = None

    def add(self, part: AnswerPart) -> Iterator[ItemEvent]:
        """Adds a part to the open item, or ends that item and opens another."""
        if self._open is None or not self._open.takes(part):
            yield from self.close("completed")
            kind = _OpenCall if part.call else _OpenReasoning if part.reasoning else _OpenMessage
            self._open = kind(part, len(self.done))
            yield from self._open.added()
        yield from self._open.extend(part)

    def close(self, status: ItemStatus) -> Iterator[ItemEvent]:
        """Ends the open item, if there is one."""
        if self._open is not None:
            yield from self._open.closed(status)
            self.done.append(self._open.item(status))
            self._open = None


class _OpenItem(ABC):
    PREFIX: ClassVar[str]

    def __init__(self, first: AnswerPart, index: int) -> None:
        self.id = new_id(self.PREFIX)
        self.position: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def takes(self, part: AnswerPart) -> bool:
        """Whether the part belongs to this item."""

    @abstractmethod
    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        """Adds a part that belongs to this item."""

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it is now. One that is in progress has no content yet."""

    def added(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", self._item_fields("in_progress")

    def closed(self, status: ItemStatus) -> Iterator[ItemEvent]:
        yield "response.output_item.done", self._item_fields(status)

    def _item_fields(self, status: ItemStatus) -> dict[str, Any]:
        return {"output_index": self.position["output_index"], "item": self.item(status)}


class _OpenText(_OpenItem):
    """An item that consists of one text."""

    EVENT: ClassVar[str]
    EXTRA: ClassVar[dict[str, Any]] = {}
    """Further fields of the events about the text."""

    def __init__(self, first: AnswerPart, index: int) -> None:
        super().__init__(first, index)
        self.position |= {"content_index": 0}

    @abstractmethod
    def content(self) -> OutputText | ReasoningText: ...

    def added(self) -> Iterator[ItemEvent]:
        yield from super().added()
        yield "response.content_part.added", {**self.position, "part": self.content()}

    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        if text := part.reasoning or part.text:
            self._texts.append(text)
            yield f"{self.EVENT}.delta", {**self.position, "delta": text, **self.EXTRA}

    def closed(self, status: ItemStatus) -> Iterator[ItemEvent]:
        yield f"{self.EVENT}.done", {**self.position, "text": self.text, **self.EXTRA}
        yield "response.content_part.done", {**self.position, "part": self.content()}
        yield from super().closed(status)


class _OpenReasoning(_OpenText):
    PREFIX, EVENT = "rs", "response.reasoning_text"

    def takes(self, part: AnswerPart) -> bool:
        return bool(part.reasoning)

    def content(self) -> ReasoningText:
        return ReasoningText(type="reasoning_text", text=self.text)

    def item(self, status: ItemStatus) -> OutputReasoning:
        content = [] if status == "in_progress" else [self.content()]
        return OutputReasoning(id=self.id, type="reasoning", status=status, summary=[], content=content)


class _OpenMessage(_OpenText):
    PREFIX, EVENT, EXTRA = "msg", "response.output_text", {"logprobs": []}

    def takes(self, part: AnswerPart) -> bool:
        return part.call is None and not part.reasoning

    def content(self) -> OutputText:
        return OutputText(type="output_text", text=self.text, annotations=[])

    def item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self.content()]
        return OutputMessage(id=self.id, type="message", status=status, role="assistant", content=content)


class _OpenCall(_OpenItem):
    PREFIX = "fc"

    def __init__(self, first: AnswerPart, index: int) -> None:
        super().__init__(first, index)
        assert first.call is not None
        self._call = first.call
        self._complete = True

    def takes(self, part: AnswerPart) -> bool:
        return part.call is not None and part.call.position == self._call.position

    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        if part.call is None:
            return
        self._complete = part.call.complete
        if part.call.arguments:
            self._texts.append(part.call.arguments)
            yield "response.function_call_arguments.delta", {**self.position, "delta": part.call.arguments}

    def closed(self, status: ItemStatus) -> Iterator[ItemEvent]:
        fields = {**self.position, "name": self._call.name, "arguments": self.text}
        yield "response.function_call_arguments.done", fields
        yield from super().closed(status)

    def item(self, status: ItemStatus) -> OutputCall:
        """A closed call has a status of its own: it may be complete even if the response was cut off after it."""
        if status != "in_progress":
            status = "completed" if self._complete else "incomplete"
        called = {"call_id": self._call.call_id, "name": self._call.name, "arguments": self.text}
        return OutputCall.model_validate({"id": self.id, "type": "function_call", "status": status, **called})


@dataclass(kw_only=True, eq=False)
class ResponseWriter(AnswerWriter):
    """Writes a response. The whole response is the object of the stream's last event, so the two cannot differ.

    `model` is the base model's name. `keep` is called with the response when it has ended, before it is sent.
    `created_at` is Unix time in seconds.
    """

    ENDS_WITH_DONE: ClassVar[bool] = False

    body: ResponsesBody
    request: GenerationRequest
    model: str
    splitter: Splitter
    keep: Callable[[ResponseObject], None]
    watch: Watch | None = None
    created_at: int = field(default_factory=lambda: int(time.time()))
    _items: OutputItems = field(default_factory=OutputItems, init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)
    _reason: FinishReason | None = field(default=None, init=False)
    _uncounted_tokens: int = field(default=0, init=False)
    _reasoning_tokens: int = field(default=0, init=False)

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

    def failed(self, error: Exception) -> ResponseEvent:
        code: ErrorCode = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
        response_error = ResponseError(code=code, message=error_body(error).error.message)
        return self._event("response.failed", response=self._response("failed", error=response_error))

    def _add(self, output: SequenceOutput) -> Iterator[ItemEvent]:
        self._uncounted_tokens += len(output.token_ids)
        self._reason = output.finish_reason
        parts = list(self.splitter.feed(output.text))
        if output.finish_reason is not None:
            parts += self.splitter.end(cut_off(output))
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
        status: ResponseStatus = "incomplete" if self._reason is FinishReason.LENGTH else "completed"
        yield from self._numbered(self._last_items(status))
        details = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        usage, trajectories = self._usage(finished), collected_fields(self.request, finished)
        response = self._response(status, incomplete_details=details, usage=usage, **trajectories)
        self.keep(response)
        yield self._event(f"response.{status}", response=response)

    def _last_items(self, status: ResponseStatus) -> Iterator[ItemEvent]:
        """Ends the open item. A response without items gets an empty message."""
        ended: ItemStatus = "incomplete" if status == "incomplete" else "completed"
        yield from self._items.close(ended)
        if not self._items.done:
            yield from self._items.add(AnswerPart())
            yield from self._items.close(ended)

    def _usage(self, finished: RequestFinished) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=finished.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=finished.cached_tokens, cache_write_tokens=0),
            output_tokens=finished.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reasoning_tokens),
            total_tokens=finished.prompt_tokens + finished.completion_tokens,
        )

    def _response(self, status: ResponseStatus, **more: Any) -> ResponseObject:
        fields = {"id": self.request.request_id, "object": "response", "created_at": self.created_at, "status": status}
        results = {"error": None, "incomplete_details": None, "usage": None, "output": list(self._items.done)}
        served = served_by(self.request, self.model)
        return ResponseObject.model_validate({**fields, **served, **self.body.returned(), **results, **more})

    def _numbered(self, events: Iterator[ItemEvent]) -> Iterator[ResponseEvent]:
        return (self._event(kind, **fields) for kind, fields in events)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)
