"""The wording of `/v1/chat/completions`: messages, deltas, chat logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.core import Event, FinishReason, GenerationRequest, PromptScored, TextTokenizer
from mlx_parallm.server.respond.answer import Answer, ending
from mlx_parallm.server.respond.logprobs import chat_logprobs, prompt_logprobs
from mlx_parallm.server.respond.parts import CallPart, told
from mlx_parallm.server.respond.pieces import Piece, cut_off, score
from mlx_parallm.server.respond.splitter import Splitter
from mlx_parallm.server.wire.chat import (
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
)
from mlx_parallm.server.wire.common import Usage
from mlx_parallm.server.wire.tools import Call, CallDelta, CalledFunction, NamedTool


class ChatAnswer(Answer):
    """One rendered prompt, n choices, each with its own splitter."""

    def __init__(
        self,
        body: ChatBody,
        request: GenerationRequest,
        model: str,
        tokenizer: TextTokenizer,
        splitter: Callable[[], Splitter],
    ) -> None:
        super().__init__(body, request, model, tokenizer)
        self._wanted = body
        self._splitters = [splitter() for _ in range(request.sequences)]

    def _pieces(self, event: Event) -> Iterator[Piece]:
        for piece in super()._pieces(event):
            splitter = self._splitters[piece.index]
            parts = [*splitter.feed(piece.text), *(splitter.end(cut_off(piece)) if piece.finish_reason else ())]
            yield replace(piece, parts=tuple(parts))

    def _tells(self, piece: Piece) -> bool:
        return bool(piece.parts) or super()._tells(replace(piece, text=""))

    def _chunk(self, pieces: Sequence[Piece], **more: Any) -> ChatCompletionChunk:
        ids = {} if self._seen else self._prompt_ids()
        choices = [self._delta(piece) for piece in pieces]
        more = {**self._usage_so_far(), **self._tail, **ids, **more}
        return ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=choices, **more)

    def _whole(self, choices: Sequence[Piece], usage: Usage, scored: dict[int, PromptScored]) -> ChatCompletion:
        more = self._prompt_ids()
        if self._wanted.prompt_logprobs is not None:
            tokens = score(self.request.prompts[0], scored[0].logprobs)
            more["prompt_logprobs"] = prompt_logprobs(self._tokenizer, tokens, self._wanted.prompt_logprobs)
        messages = [self._message(piece) for piece in choices]
        return ChatCompletion(
            **self._head, object="chat.completion", choices=messages, usage=usage, **self._tail, **more
        )

    def _delta(self, piece: Piece) -> ChatChunkChoice:
        said = told(piece.parts)
        more: dict[str, Any] = thoughts(said.reasoning)
        if self._first(piece):
            more |= {"role": "assistant", "content": said.content}
        elif said.text:
            more["content"] = said.text
        if said.calls:
            more["tool_calls"] = [_call_delta(call) for call in said.calls]
        return ChatChunkChoice(index=piece.index, delta=ChatDelta(**more), **self._details(piece))

    def _message(self, piece: Piece) -> ChatChoice:
        said = told(piece.parts)
        more: dict[str, Any] = thoughts(said.reasoning)
        if said.calls:
            more["tool_calls"] = [_call(call) for call in said.calls]
        message = ChatMessage(role="assistant", content=said.content, **more)
        return ChatChoice(index=piece.index, message=message, **self._details(piece))

    def _details(self, piece: Piece) -> dict[str, Any]:
        wanted = self._wanted
        as_ids = wanted.return_tokens_as_token_ids
        top = wanted.top_logprobs
        logprobs = chat_logprobs(self._tokenizer, piece.scored, top, as_ids) if piece.scored else None
        ids = {"token_ids": list(piece.token_ids)} if wanted.return_token_ids else {}
        return {"logprobs": logprobs, **ending(piece), **self._called(piece), **ids}

    def _called(self, piece: Piece) -> dict[str, str]:
        """The reason that a choice ended which has called. OpenAI says `stop` where the call was named."""
        named = isinstance(self._wanted.tool_choice, NamedTool)
        called = self._splitters[piece.index].called and piece.finish_reason is FinishReason.STOP
        return {"finish_reason": "tool_calls"} if called and not named else {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.request.prompts[0])} if self._wanted.return_token_ids else {}


def thoughts(reasoning: str) -> dict[str, str]:
    """By both of its names."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def _call(part: CallPart) -> Call:
    assert part.call_id is not None
    return Call(id=part.call_id, type="function", function=CalledFunction(name=part.name, arguments=part.arguments))


def _call_delta(part: CallPart) -> CallDelta:
    if part.call_id is None:
        return CallDelta(index=part.position, function=CalledFunction(arguments=part.arguments))
    return CallDelta(index=part.position, **_call(part).model_dump())
