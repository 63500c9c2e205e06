"""Turns the engine's events into an answer of Ollama's API: one object, or lines of JSON, the last of which has `done`.

A tool call may come in pieces. Its pieces are held back until it is complete, because a line has whole calls only.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlx_parallm.core.requests import (
    Event,
    FinishReason,
    RequestFinished,
    SequenceOutput,
    TokenLogprob,
)
from mlx_parallm.core.splitter import AnswerPart, CallPart, JoinedParts, Splitter, join_parts
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.extras.ollama.objects import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    ChatAnswer,
    GenerateAnswer,
    timestamp,
)
from mlx_parallm.server.api.answer import (
    AnswerWriter,
    call_arguments,
    collected_fields,
    parts_of,
    repaired_fields,
    repetition_fields,
    served_by,
)
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.logprobs import ChatTokenLogprob, ScoredToken, chat_logprobs
from mlx_parallm.server.errors import OllamaError, error_body, ollama_error, rule_of
from mlx_parallm.server.streams import JSON_LINES, Framing

NOTHING = JoinedParts("", "", ())


@dataclass(kw_only=True, eq=False)
class OllamaWriter(AnswerWriter):
    """Writes an answer. Subclasses write what the model said."""

    FRAMING: ClassVar[Framing] = JSON_LINES

    tokenizer: TextTokenizer
    splitter: Splitter
    _reason: FinishReason | None = field(default=None, init=False)
    _call: list[AnswerPart] = field(default_factory=list, init=False)
    _scored: list[TokenLogprob] = field(default_factory=list, init=False)

    def chunks(self, event: Event) -> Iterator[WireOutput]:
        if isinstance(event, RequestFinished):
            yield self._answer(NOTHING, **self._ending(event))
        elif (said := join_parts(self._parts(event))) != NOTHING:
            yield self._answer(said, done=False, **self._logprobs())

    def whole(self, events: Sequence[Event]) -> WireOutput:
        finished = events[-1]
        assert isinstance(finished, RequestFinished)
        said = join_parts(part for event in events for part in self._parts(event))
        return self._answer(said, **self._ending(finished))

    def failed(self, error: Exception) -> OllamaError:
        return ollama_error(rule_of(type(error)).status, error_body(error))

    @abstractmethod
    def _answer(self, said: JoinedParts, **fields: Any) -> WireOutput:
        """What the model said as the whole answer, or as one line."""

    def _parts(self, event: Event) -> Iterator[AnswerPart]:
        """The parts that an event adds, in which each call is whole."""
        if not isinstance(event, SequenceOutput):
            return
        self._reason = event.finish_reason
        self._scored += event.logprobs
        for part in parts_of(self.splitter, event):
            if part.call is None:
                yield part
            else:
                yield from self._complete_calls(part, part.call)
        if event.finish_reason is not None:
            yield from self._call

    def _complete_calls(self, part: AnswerPart, call: CallPart) -> Iterator[AnswerPart]:
        """Holds a piece of a call back. If it is the last one, returns the whole call."""
        self._call.append(part)
        if call.complete:
            yield from self._call
            self._call.clear()

    def _ending(self, finished: RequestFinished) -> dict[str, Any]:
        return {
            **self._logprobs(),
            "done": True,
            "done_reason": "length" if self._reason is not None and self._reason.cut_off else "stop",
            **repetition_fields(self._reason),
            **durations(finished),
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": _ns(finished.started_at, finished.first_token_at),
            "eval_count": finished.completion_tokens,
            "eval_duration": _ns(finished.first_token_at, finished.finished_at),
            **collected_fields(self.request, finished),
            **repaired_fields(self.splitter),
        }

    def _logprobs(self) -> dict[str, list[ChatTokenLogprob]]:
        """The logprobs of the tokens since the last line."""
        top, scored, self._scored = self.request.sampling.top_logprobs, self._scored, []
        if top is None or not scored:
            return {}
        tokens = (ScoredToken(logprob.token_id, logprob) for logprob in scored)
        return {"logprobs": chat_logprobs(self.tokenizer, tokens, top).content}

    def _stamp(self) -> dict[str, Any]:
        return {**served_by(self.request), "created_at": timestamp(time.time())}


class OllamaChatWriter(OllamaWriter):
    """Writes what the model said as a message."""

    def _answer(self, said: JoinedParts, **fields: Any) -> ChatAnswer:
        more: dict[str, Any] = {"thinking": said.reasoning} if said.reasoning else {}
        if said.calls:
            more["tool_calls"] = [_call(call) for call in said.calls]
        message = AnsweredMessage(role="assistant", content=said.text, **more)
        return ChatAnswer(**self._stamp(), message=message, **fields)


class GenerateWriter(OllamaWriter):
    """Writes what the model said as a text."""

    def _answer(self, said: JoinedParts, **fields: Any) -> GenerateAnswer:
        thinking: dict[str, Any] = {"thinking": said.reasoning} if said.reasoning else {}
        return GenerateAnswer(**self._stamp(), response=said.text, **thinking, **fields)


def durations(finished: RequestFinished) -> dict[str, int]:
    """The times that every answer has."""
    return {
        "total_duration": _ns(finished.arrived_at, finished.finished_at),
        "load_duration": _ns(finished.arrived_at, finished.started_at),
    }


def _ns(since: float, until: float) -> int:
    """Nanoseconds between two times; 0 if one of them did not come."""
    return max(0, round((until - since) * 1e9))


def _call(call: CallPart) -> AnsweredCall:
    assert call.call_id is not None
    assert call.name is not None
    return AnsweredCall(
        id=call.call_id, function=AnsweredFunction(name=call.name, arguments=call_arguments(call.arguments))
    )
