"""Turns the engine's events into a response: one object, or a stream of typed, numbered events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlx_parallm.core.requests import Event, FinishReason, RequestFinished, SequenceOutput
from mlx_parallm.core.splitter import AnswerPart, Splitter
from mlx_parallm.errors import ContextLengthError, RequestError
from mlx_parallm.server.api.answer import AnswerWriter, collected_fields, parts_of, repetition_fields, served_by
from mlx_parallm.server.api.repairs import repaired_fields
from mlx_parallm.server.api.responses.items import ItemEvent, OutputItems
from mlx_parallm.server.api.responses.objects import (
    ErrorCode,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
    new_id,
)
from mlx_parallm.server.api.responses.schema import ResponsesBody
from mlx_parallm.server.errors import error_body
from mlx_parallm.server.streams import EVENTS, Framing


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
    _items: OutputItems = field(init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)
    _reason: FinishReason | None = field(default=None, init=False)
    _uncounted_tokens: int = field(default=0, init=False)
    _reasoning_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._items = OutputItems({tool.function["name"]: tool for tool in self.body.offered()})

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
        status: ResponseStatus = "incomplete" if cut else "completed"
        yield from self._numbered(self._last_items(status))
        details = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        more = {**repetition_fields(self._reason), **collected_fields(self.request, finished)}
        more |= repaired_fields(self.splitter)
        response = self._response(status, incomplete_details=details, usage=self._usage(finished), **more)
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
