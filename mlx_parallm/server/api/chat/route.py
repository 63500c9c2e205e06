"""`POST /v1/chat/completions`: the engine's request for a conversation, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from mlx_parallm.core import (
    AdapterRef,
    CollectionSpec,
    Event,
    FinishReason,
    GenerationRequest,
    PromptScored,
    TextTokenizer,
)
from mlx_parallm.server.api.answer import ChoicePiece, ChoiceWriter, Usage, cut_off, ending
from mlx_parallm.server.api.chat.messages import render
from mlx_parallm.server.api.chat.schema import (
    Call,
    CallDelta,
    CalledFunction,
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
)
from mlx_parallm.server.api.chat.splitter import CallPart, JoinedParts, Splitter, join_parts
from mlx_parallm.server.api.chat.tools import NamedTool, answer_grammar, answer_syntax
from mlx_parallm.server.api.logprobs import chat_logprobs, prompt_logprobs, scored_prompt
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.http.body import json_body, request_body
from mlx_parallm.server.http.request_log import new_request_id
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.planning import plan, work_class
from mlx_parallm.server.services import Services, ServicesDep

router = APIRouter()
Body = Annotated[ChatBody, Depends(json_body(ChatBody))]


@router.post("/v1/chat/completions", responses=streamable(ChatCompletion), openapi_extra=request_body(ChatBody))
async def create_chat_completion(body: Body, services: ServicesDep) -> Response:
    """Continues a conversation, rendered with the model's own chat template."""
    return GenerationResponse(services, body, 1, partial(prepare, body, services))


def prepare(body: ChatBody, services: Services, adapter: AdapterRef, collection: CollectionSpec | None) -> ChatWriter:
    """Renders, tokenises and builds the engine's request. Runs in a worker thread."""
    request, splitter = plan_chat(new_request_id("chatcmpl"), body, services, adapter, collection)
    return ChatWriter(body, request, services.card.name, services.tokenizer, splitter)


def plan_chat(
    request_id: str, body: ChatBody, services: Services, adapter: AdapterRef, collection: CollectionSpec | None
) -> tuple[GenerationRequest, Callable[[], Splitter]]:
    """The engine's request for a conversation, and how to make the splitter of each choice."""
    prompt = prompt_of(body, services)
    syntax = answer_syntax(body, prompt, services.tokenizer)
    request = plan(
        request_id=request_id,
        body=body,
        prompts=[prompt],
        card=services.card,
        adapter=adapter,
        collection=collection,
        work_class=work_class(body, services.config),
        grammar=answer_grammar(body, syntax, services.grammars),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        visible_specials=syntax.visible_specials,
    )
    return request, partial(Splitter, syntax)


def prompt_of(body: ChatBody, services: Services) -> list[int]:
    """The token ids of the rendered conversation. Call it in a worker thread.

    Raises:
        InvalidRequestError: the model has no template, or the template refuses the messages.
        ContextLengthError: the conversation is far too long.
    """
    tokenizer, options = services.tokenizer, body.chat_template_kwargs
    at_most = services.card.context_length
    return render(body.messages, body.callable_tools, tokenizer, body.add_generation_prompt, options, at_most)


class ChatWriter(ChoiceWriter[ChatBody]):
    """Writes messages and deltas. The choices answer one prompt, and each has its own splitter."""

    def __init__(
        self,
        body: ChatBody,
        request: GenerationRequest,
        model: str,
        tokenizer: TextTokenizer,
        splitter: Callable[[], Splitter],
    ) -> None:
        super().__init__(body, request, model, tokenizer)
        self._splitters = [splitter() for _ in range(request.sequences)]

    def _pieces(self, event: Event) -> Iterator[ChoicePiece]:
        for piece in super()._pieces(event):
            splitter = self._splitters[piece.index]
            parts = [*splitter.feed(piece.text), *(splitter.end(cut_off(piece)) if piece.finish_reason else ())]
            yield replace(piece, parts=tuple(parts))

    def _is_visible(self, piece: ChoicePiece) -> bool:
        return bool(piece.parts) or super()._is_visible(replace(piece, text=""))

    def _chunk(self, pieces: Sequence[ChoicePiece], **more: Any) -> ChatCompletionChunk:
        ids = {} if self._begun else self._prompt_ids()
        choices = [self._delta(piece) for piece in pieces]
        more = {**self._usage_so_far(), **self._tail, **ids, **more}
        return ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=choices, **more)

    def _whole(self, choices: Sequence[ChoicePiece], usage: Usage, scored: dict[int, PromptScored]) -> ChatCompletion:
        more = self._prompt_ids()
        if self._body.prompt_logprobs is not None:
            tokens = scored_prompt(self.request.prompts[0], scored[0].logprobs)
            more["prompt_logprobs"] = prompt_logprobs(self._tokenizer, tokens, self._body.prompt_logprobs)
        messages = [self._message(piece) for piece in choices]
        return ChatCompletion(
            **self._head, object="chat.completion", choices=messages, usage=usage, **self._tail, **more
        )

    def _delta(self, piece: ChoicePiece) -> ChatChunkChoice:
        joined = join_parts(piece.parts)
        fields = _reasoning_fields(joined)
        if self._begins(piece):
            fields |= {"role": "assistant", "content": joined.content}
        elif joined.text:
            fields["content"] = joined.text
        if joined.calls:
            fields["tool_calls"] = [_call_delta(call) for call in joined.calls]
        return ChatChunkChoice(index=piece.index, delta=ChatDelta(**fields), **self._details(piece))

    def _message(self, piece: ChoicePiece) -> ChatChoice:
        joined = join_parts(piece.parts)
        fields = _reasoning_fields(joined)
        if joined.calls:
            fields["tool_calls"] = [_call(call) for call in joined.calls]
        message = ChatMessage(role="assistant", content=joined.content, **fields)
        return ChatChoice(index=piece.index, message=message, **self._details(piece))

    def _details(self, piece: ChoicePiece) -> dict[str, Any]:
        """The fields that a choice has beside its message or delta."""
        top, as_ids = self._body.top_logprobs, self._body.return_tokens_as_token_ids
        logprobs = chat_logprobs(self._tokenizer, piece.scored, top, as_ids) if piece.scored else None
        ids = {"token_ids": list(piece.token_ids)} if self._body.return_token_ids else {}
        return {"logprobs": logprobs, **ending(piece), **self._called(piece), **ids}

    def _called(self, piece: ChoicePiece) -> dict[str, str]:
        """The finish reason of a choice that called tools. OpenAI keeps `stop` if the request named the function."""
        named = isinstance(self._body.tool_choice, NamedTool)
        called = self._splitters[piece.index].called and piece.finish_reason is FinishReason.STOP
        return {"finish_reason": "tool_calls"} if called and not named else {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.request.prompts[0])} if self._body.return_token_ids else {}


def _reasoning_fields(joined: JoinedParts) -> dict[str, Any]:
    """The reasoning under both of its names."""
    return {"reasoning_content": joined.reasoning, "reasoning": joined.reasoning} if joined.reasoning else {}


def _call(part: CallPart) -> Call:
    assert part.call_id is not None
    return Call(id=part.call_id, type="function", function=CalledFunction(name=part.name, arguments=part.arguments))


def _call_delta(part: CallPart) -> CallDelta:
    if part.call_id is None:
        return CallDelta(index=part.position, function=CalledFunction(arguments=part.arguments))
    return CallDelta(index=part.position, **_call(part).model_dump())
