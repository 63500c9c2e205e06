"""From the engine's events to a response: typed, numbered events of a stream, or one object."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from mlx_parallm.core import Event, FinishReason, GenerationRequest, RequestFinished, SequenceOutput
from mlx_parallm.errors import RequestError
from mlx_parallm.server.api.answer import AnswerWriter, collected_fields, cut_off, served_by
from mlx_parallm.server.api.chat.schema import ChatBody
from mlx_parallm.server.api.chat.splitter import AnswerPart, Splitter
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
)
from mlx_parallm.server.api.responses.schema import NamedFunction, ResponsesBody
from mlx_parallm.server.api.responses.stream_items import ItemEvent, OutputItems
from mlx_parallm.server.errors import error_body


class ResponseWriter(AnswerWriter):
    """Writes a response. The whole response is the object of the stream's last event, so the two cannot differ.

    `keep` is called with the response when it has ended, before it is sent. `model` is the base model's name.
    """

    ENDS_WITH_DONE: ClassVar[bool] = False

    def __init__(
        self,
        body: ResponsesBody,
        chat: ChatBody,
        request: GenerationRequest,
        model: str,
        splitter: Splitter,
        keep: Callable[[ResponseObject], None],
    ) -> None:
        self.request = request
        identity = {"id": request.request_id, "object": "response", "created_at": int(time.time())}
        self._fields = {**identity, **served_by(request, model), **_request_fields(body, chat)}
        self._splitter = splitter
        self._keep = keep
        self._items = OutputItems()
        self._numbers = itertools.count()
        self._reason: FinishReason | None = None
        self._uncounted_tokens = 0
        self._reasoning_tokens = 0

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
        parts = list(self._splitter.feed(output.text))
        if output.finish_reason is not None:
            parts += self._splitter.end(cut_off(output))
        self._count_reasoning(parts)
        for part in parts:
            yield from self._items.add(part)

    def _count_reasoning(self, parts: Sequence[AnswerPart]) -> None:
        """Counts tokens with the parts that their text came out in. Tokens of marks count with the next parts."""
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
        self._keep(response)
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
        results = {"error": None, "incomplete_details": None, "usage": None, "output": list(self._items.done)}
        return ResponseObject(**self._fields, status=status, **(results | more))

    def _numbered(self, events: Iterator[ItemEvent]) -> Iterator[ResponseEvent]:
        return (self._event(kind, **fields) for kind, fields in events)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)


def _request_fields(body: ResponsesBody, chat: ChatBody) -> dict[str, Any]:
    """The fields of the response that repeat those of the request."""
    choice = body.tool_choice
    return {
        "previous_response_id": body.previous_response_id,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "text": {"format": body.text.format.sent()},
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools],
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        # The metadata of a collected request is for its scorer and may be long: it is not returned.
        "metadata": {} if body.collect_trajectory else body.metadata or {},
        "store": body.store,
        "background": False,
        "truncation": body.truncation,
    }
