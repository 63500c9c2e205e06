"""The wording of `/v1/responses`: one sequence as items and typed, numbered events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from mlx_parallm.core import BASE_ADAPTER, Event, FinishReason, GenerationRequest, RequestFinished, SequenceOutput
from mlx_parallm.errors import RequestError
from mlx_parallm.server.errors import error_body
from mlx_parallm.server.respond.answer import adapter_of, collected
from mlx_parallm.server.respond.parts import Part
from mlx_parallm.server.respond.pieces import cut_off
from mlx_parallm.server.respond.response_items import Output, Said
from mlx_parallm.server.respond.splitter import Splitter
from mlx_parallm.server.respond.wording import Wording
from mlx_parallm.server.wire.chat import ChatBody
from mlx_parallm.server.wire.response_object import (
    FaultCode,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseEvent,
    ResponseFault,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from mlx_parallm.server.wire.responses import NamedFunction, ResponsesBody


class ResponsesAnswer(Wording):
    """The whole answer is what the last event of the stream carries, so the two cannot differ.

    `keep` is given the response when it has ended, before the client is. `model` is the base's name.
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
        super().__init__(request)
        self._said = {**_identity(request, model), **_asked(body, chat)}
        self._splitter = splitter
        self._keep = keep
        self._output = Output()
        self._numbers = itertools.count()
        self._reason: FinishReason | None = None
        self._untold_tokens = 0
        self._reasoning_tokens = 0

    def opening_chunks(self) -> Iterator[ResponseEvent]:
        begun = self._response("in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def chunks(self, event: Event) -> Iterator[ResponseEvent]:
        if isinstance(event, SequenceOutput):
            yield from self._numbered(self._grow(event))
        elif isinstance(event, RequestFinished):
            yield from self._closing(event)

    def whole(self, events: Sequence[Event]) -> ResponseObject:
        *_, last = (chunk for event in events for chunk in self.chunks(event))
        assert last.response is not None
        return last.response

    def failed(self, error: Exception) -> ResponseEvent:
        code: FaultCode = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
        fault = ResponseFault(code=code, message=error_body(error).error.message)
        return self._event("response.failed", response=self._response("failed", error=fault))

    def _grow(self, output: SequenceOutput) -> Iterator[Said]:
        self._untold_tokens += len(output.token_ids)
        self._reason = output.finish_reason
        parts = list(self._splitter.feed(output.text))
        if output.finish_reason is not None:
            parts += self._splitter.end(cut_off(output))
        self._count(parts)
        for part in parts:
            yield from self._output.add(part)

    def _count(self, parts: Sequence[Part]) -> None:
        """Tokens belong to what their text came out in, those of marks to what came next."""
        if any(part.reasoning for part in parts):
            self._reasoning_tokens += self._untold_tokens
        if parts:
            self._untold_tokens = 0

    def _closing(self, finished: RequestFinished) -> Iterator[ResponseEvent]:
        cut = self._reason is FinishReason.LENGTH
        status: ResponseStatus = "incomplete" if cut else "completed"
        yield from self._numbered(self._last_items(cut))
        details = IncompleteDetails(reason="max_output_tokens") if cut else None
        usage, trajectories = self._usage(finished), collected(self.request, finished)
        response = self._response(status, incomplete_details=details, usage=usage, **trajectories)
        self._keep(response)
        yield self._event(f"response.{status}", response=response)

    def _last_items(self, cut: bool) -> Iterator[Said]:
        """An answer that says nothing is an empty message."""
        yield from self._output.close("incomplete" if cut else "completed")
        if not self._output.done:
            yield from self._output.add(Part())
            yield from self._output.close("incomplete" if cut else "completed")

    def _usage(self, finished: RequestFinished) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=finished.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=finished.cached_tokens, cache_write_tokens=0),
            output_tokens=finished.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reasoning_tokens),
            total_tokens=finished.prompt_tokens + finished.completion_tokens,
        )

    def _response(self, status: ResponseStatus, **more: Any) -> ResponseObject:
        ends = {"error": None, "incomplete_details": None, "usage": None, "output": list(self._output.done)}
        return ResponseObject(**self._said, status=status, **(ends | more))

    def _numbered(self, told: Iterator[Said]) -> Iterator[ResponseEvent]:
        return (self._event(kind, **fields) for kind, fields in told)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields)


def _identity(request: GenerationRequest, model: str) -> dict[str, Any]:
    name = {"model": model if request.adapter == BASE_ADAPTER else request.adapter.name}
    adapter = adapter_of(request)
    served = name if adapter is None else {**name, "lora_adapter": adapter}
    return {"id": request.request_id, "object": "response", "created_at": int(time.time()), **served}


def _asked(body: ResponsesBody, chat: ChatBody) -> dict[str, Any]:
    """What the request asked for, as it was understood."""
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
        # A collected request's metadata is its scorer's, and long perhaps: it is not said again.
        "metadata": {} if body.collect_trajectory else body.metadata or {},
        "store": body.store,
        "background": False,
        "truncation": body.truncation,
    }
