"""`/v1/messages`: Anthropic's Messages API on top of chat. The engine's events become a message: one object, or a
stream of events.

    message_start
    for each block: content_block_start, content_block_delta …, content_block_stop
    message_delta, message_stop
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.requests import Event, FinishReason, RequestFinished, SequenceOutput
from mlx_parallm.core.splitter import AnswerPart, Splitter
from mlx_parallm.errors import ContextLengthError
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import (
    AnswerWriter,
    RepairedCall,
    Section,
    Sections,
    call_arguments,
    collected_fields,
    parts_of,
    repaired_fields,
    repetition_fields,
    served_by,
    text_of,
)
from mlx_parallm.server.api.chat import plan_chat, prompt_of
from mlx_parallm.server.api.dialect import CONVERSATION, Dialect
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.messages.body import ConversationBody, CountTokensBody, MessagesBody, MessagesChat
from mlx_parallm.server.body import json_body
from mlx_parallm.server.errors import MessagesError, UnknownThreadError, error_body, messages_error, rule_of
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.request import RequestContext
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.streams import EVENTS, Framing

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(WireOutput):
    """A text."""

    type: Literal["text"]
    text: str
    """The text; empty in the event that starts the block."""


class ThinkingContent(WireOutput):
    """The model's reasoning before its texts and calls."""

    type: Literal["thinking"]
    thinking: str
    """The reasoning; empty in the event that starts the block."""
    signature: Literal[""]
    """Always empty: the block can be sent back without one."""


class ToolUseContent(WireOutput):
    """A tool that the client is asked to run."""

    type: Literal["tool_use"]
    id: str
    """The id by which the block with the result refers to the call."""
    name: str
    """The tool's name."""
    input: dict[str, Any]
    """The tool's arguments. If the token limit cut the call off, those that were written before. Empty in the event
    that starts the block."""


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(WireOutput):
    """The number of tokens in a request and its answer. The prompt's tokens are the sum of the first three."""

    input_tokens: int
    """Tokens of the prompt that were computed. In the event `message_start`, all tokens of the prompt."""
    cache_creation_input_tokens: int | None = None
    """Always 0."""
    cache_read_input_tokens: int | None = None
    """Tokens of the prompt whose keys and values were taken from the prefix cache."""
    output_tokens: int
    """Tokens generated."""


class MessageObject(WireOutput):
    """A message of the model."""

    id: str
    """The message's id."""
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    """The served model, or the adapter's name."""
    lora_adapter: str | None = None
    """`name@version` of the adapter; absent for the base."""
    content: list[ContentBlock]
    """Reasoning, texts and calls, in order: at least one block, and none in the event `message_start`."""
    stop_reason: StopReason | None
    """Why the message ended: the model ended it, it was cut off (by the limit, the end of the context, or because it
    repeated itself), one of `stop_sequences` came, or tools were called. Null in the event `message_start`."""
    stop_sequence: str | None
    """The stop sequence that ended the message."""
    finish_reason: Literal["repetition"] | None = None
    """`repetition`: the message repeated itself without end; `stop_reason` is `max_tokens` then."""
    usage: MessageUsage
    """Numbers of tokens."""
    trajectory_ids: list[str] | None = None
    """One id, with `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectory will not be used for training, for example because a stale version sampled it."""
    repaired_tool_calls: list[RepairedCall] | None = None
    """The calls that were repaired; absent if none was."""


class BlockDelta(WireOutput):
    """What an event adds to a block: the field that belongs to its type."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str | None = None
    """More text."""
    thinking: str | None = None
    """More reasoning."""
    signature: str | None = None
    """The signature of the reasoning: always empty."""
    partial_json: str | None = None
    """More of the JSON text of a tool's arguments."""


class MessageEnd(WireOutput):
    """How the message ended."""

    stop_reason: StopReason
    """See the message's field."""
    stop_sequence: str | None
    """See the message's field."""
    finish_reason: Literal["repetition"] | None = None
    """See the message's field."""


class MessageEvent(WireOutput):
    """One event of a stream. It has the fields of Anthropic's event of the same `type`."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
    message: MessageObject | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: BlockDelta | MessageEnd | None = None
    usage: MessageUsage | None = None
    trajectory_ids: list[str] | None = None
    trajectory_warning: str | None = None
    repaired_tool_calls: list[RepairedCall] | None = None

    @property
    def event_name(self) -> str:
        return self.type


class TokenCount(WireOutput):
    """The length of a prompt."""

    input_tokens: int
    """Tokens of the whole conversation, including tools and the system message."""


class OpenBlock(Section[ContentBlock, MessageEvent]):
    """The content block that is being written."""

    def begin(self) -> Iterator[MessageEvent]:
        yield self._event("content_block_start", content_block=self._block(""))

    def extend(self, part: AnswerPart) -> Iterator[MessageEvent]:
        if text := text_of(part):
            self._texts.append(text)
            yield self._event("content_block_delta", delta=self._delta(text))

    def end(self, cut: bool) -> Iterator[MessageEvent]:
        if self.first.reasoning:
            yield self._event("content_block_delta", delta=BlockDelta(type="signature_delta", signature=""))
        yield self._event("content_block_stop")

    def whole(self, cut: bool) -> ContentBlock:
        return self._block(self.text)

    def _block(self, text: str) -> ContentBlock:
        if (call := self.first.call) is not None:
            assert call.call_id is not None
            assert call.name is not None
            return ToolUseContent(type="tool_use", id=call.call_id, name=call.name, input=call_arguments(text))
        if self.first.reasoning:
            return ThinkingContent(type="thinking", thinking=text, signature="")
        return TextContent(type="text", text=text)

    def _delta(self, text: str) -> BlockDelta:
        if self.first.call is not None:
            return BlockDelta(type="input_json_delta", partial_json=text)
        if self.first.reasoning:
            return BlockDelta(type="thinking_delta", thinking=text)
        return BlockDelta(type="text_delta", text=text)

    def _event(self, kind: str, **fields: Any) -> MessageEvent:
        return MessageEvent.model_validate({"type": kind, "index": self.index, **fields})


@dataclass(kw_only=True, eq=False)
class MessageWriter(AnswerWriter):
    """Writes a message. The whole message has the blocks of the stream, so the two cannot differ."""

    FRAMING: ClassVar[Framing] = EVENTS

    splitter: Splitter
    _blocks: Sections[ContentBlock, MessageEvent] = field(default_factory=lambda: Sections(OpenBlock), init=False)
    _last: SequenceOutput | None = field(default=None, init=False)

    def opening_chunks(self) -> Iterator[MessageEvent]:
        prompt = sum(map(len, self.request.prompts))
        usage = MessageUsage(input_tokens=prompt, output_tokens=0)
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage=usage)
        yield MessageEvent(type="message_start", message=message)

    def chunks(self, event: Event) -> Iterator[MessageEvent]:
        if isinstance(event, SequenceOutput):
            self._last = event
            for part in parts_of(self.splitter, event):
                yield from self._blocks.add(part)
        elif isinstance(event, RequestFinished):
            yield from self._closing_events(event)

    def whole(self, events: Sequence[Event]) -> MessageObject:
        *_, end, _ = (chunk for event in events for chunk in self.chunks(event))
        assert isinstance(end.delta, MessageEnd)
        more = end.model_dump(exclude_unset=True, exclude={"type", "delta"})
        return self._message(self._blocks.done, end.delta.model_dump(exclude_unset=True), **more)

    def failed(self, error: Exception) -> MessagesError:
        return messages_error(rule_of(type(error)).status, error_body(error))

    def keep_alive(self) -> MessageEvent:
        return MessageEvent(type="ping")

    def _closing_events(self, finished: RequestFinished) -> Iterator[MessageEvent]:
        yield from self._blocks.end(self._reason is not None and self._reason.cut_off)
        fields = {"usage": _usage(finished), **collected_fields(self.request, finished)}
        fields |= repaired_fields(self.splitter)
        yield MessageEvent(type="message_delta", delta=self._end(), **fields)
        yield MessageEvent(type="message_stop")

    def _end(self) -> MessageEnd:
        reason = self._stop_reason()
        stop = self._last.stop_reason if self._last and reason == "stop_sequence" else None
        sequence = stop if isinstance(stop, str) else None
        return MessageEnd(stop_reason=reason, stop_sequence=sequence, **repetition_fields(self._reason))

    @property
    def _reason(self) -> FinishReason | None:
        return None if self._last is None else self._last.finish_reason

    def _stop_reason(self) -> StopReason:
        if self._reason is not None and self._reason.cut_off:
            return "max_tokens"
        if self.splitter.called:
            return "tool_use"
        stopped = self._last is not None and isinstance(self._last.stop_reason, str)
        return "stop_sequence" if stopped else "end_turn"

    def _message(self, content: Sequence[ContentBlock], end: dict[str, Any], **more: Any) -> MessageObject:
        fields = {"id": self.request.request_id, "type": "message", "role": "assistant"}
        served = served_by(self.request)
        return MessageObject.model_validate({**fields, **served, "content": list(content), **end, **more})


def _usage(finished: RequestFinished) -> MessageUsage:
    return MessageUsage(
        input_tokens=finished.prompt_tokens - finished.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=finished.cached_tokens,
        output_tokens=finished.completion_tokens,
    )


DIALECT = Dialect(
    MessagesChat,
    {
        CONVERSATION: "messages",
        r"response_format(\.json_schema)?": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "stop": "stop_sequences",
        r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
        r"tools\[(\d+)\]\.function": r"tools[\1]",
    },
)

router = Router()
Body = Annotated[MessagesBody, Depends(json_body(MessagesBody))]
CountBody = Annotated[CountTokensBody, Depends(json_body(CountTokensBody))]


@router.post(
    "/v1/messages",
    role=Role.INFERENCE,
    responses=streamable(MessageObject),
    examples={
        "a question": {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "system": "Be brief.",
            "max_tokens": 8,
        },
        "as a stream": {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 8,
            "stream": True,
        },
    },
)
async def create_message(body: Body, request: Request, services: ServicesDep) -> Response:
    """Answers a conversation, as Anthropic's API does. `max_tokens` that do not fit the context are lowered."""
    chat = await services.workers.run(request.state.body_bytes, partial(_as_chat, body))
    return GenerationResponse(services, chat, 1, partial(prepare, chat, services))


@router.post(
    "/v1/messages/count_tokens",
    role=Role.INFERENCE,
    examples={"a question": {"messages": [{"role": "user", "content": "What is the capital of France?"}]}},
)
async def count_tokens(body: CountBody, request: Request, services: ServicesDep) -> TokenCount:
    """Counts the tokens of the prompt that `POST /v1/messages` would make of the same body. Generates nothing."""
    services.check_model(body.model)
    async with services.model_for(body.model) as model:
        tokens = await services.workers.run(request.state.body_bytes, partial(_count_tokens, body, model))
    return TokenCount(input_tokens=tokens)


def prepare(chat: MessagesChat, services: Services, context: RequestContext) -> MessageWriter:
    """Renders and tokenises the conversation, and builds the engine's request, as chat does. Runs in a worker
    thread."""
    if context.model.tokenizer.reasoning is None:
        chat = chat.model_copy(update={"thinking_token_budget": None})
    with _own_errors():
        planned = plan_chat(f"msg_{uuid.uuid4().hex}", chat, services, context)
    return MessageWriter(
        request=planned.request,
        splitter=Splitter(planned.syntax),
        watch=planned.watch,
    )


def _count_tokens(body: ConversationBody, model: ServedModel) -> int:
    """The length of the prompt. Runs in a worker thread."""
    chat = _as_chat(body)
    with _own_errors():
        return len(prompt_of(chat, model))


def _as_chat(body: ConversationBody) -> MessagesChat:
    """The conversation as a chat body. Runs in a worker thread.

    Raises:
        UnknownThreadError: the server should know what was said before.
        InvalidRequestError: the chat body is not valid; the error has this API's name of the field.
    """
    if body.thread and body.thread.get("type") != "create":
        raise UnknownThreadError("This server keeps no threads; send the whole conversation in messages.", "thread")
    return DIALECT.translated(body.for_chat())


@contextmanager
def _own_errors() -> Iterator[None]:
    """Errors that leave the block have this API's names of the fields. One about the length of the prompt begins as
    Anthropic's does, because clients look for it and then shorten the conversation."""
    try:
        with DIALECT.own_names():
            yield
    except ContextLengthError as error:
        raise ContextLengthError(f"prompt is too long: {error}", param=error.param) from None
