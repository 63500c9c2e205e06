"""The wording of `/v1/chat/completions`: messages, deltas, chat logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_parallm.core import GenerationRequest, PromptScored, TextTokenizer
from mlx_parallm.server.respond.answer import Answer, ending
from mlx_parallm.server.respond.logprobs import chat_logprobs, prompt_logprobs
from mlx_parallm.server.respond.pieces import Piece, score
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


class ChatAnswer(Answer):
    """One rendered prompt, n choices."""

    def __init__(self, body: ChatBody, request: GenerationRequest, model: str, tokenizer: TextTokenizer) -> None:
        super().__init__(body, request, model, tokenizer)
        self._wanted = body

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
        if self._first(piece):
            delta = ChatDelta(role="assistant", content=piece.text)
        else:
            delta = ChatDelta(content=piece.text) if piece.text else ChatDelta()
        return ChatChunkChoice(index=piece.index, delta=delta, **self._details(piece))

    def _message(self, piece: Piece) -> ChatChoice:
        message = ChatMessage(role="assistant", content=piece.text)
        return ChatChoice(index=piece.index, message=message, **self._details(piece))

    def _details(self, piece: Piece) -> dict[str, Any]:
        wanted = self._wanted
        logprobs = chat_logprobs(self._tokenizer, piece.scored, wanted.top_logprobs) if piece.scored else None
        ids = {"token_ids": list(piece.token_ids)} if wanted.return_token_ids else {}
        return {"logprobs": logprobs, **ending(piece), **ids}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.request.prompts[0])} if self._wanted.return_token_ids else {}
