"""The wording of `/v1/completions`: text, echoed prompts, legacy logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_parallm.core import Event, GenerationRequest, PromptScored, TextTokenizer
from mlx_parallm.server.respond.answer import Answer, ending
from mlx_parallm.server.respond.logprobs import LegacyLogprobs, prompt_logprobs
from mlx_parallm.server.respond.pieces import Piece, score
from mlx_parallm.server.wire.common import Usage
from mlx_parallm.server.wire.completions import Completion, CompletionBody, CompletionChoice


class CompletionAnswer(Answer):
    """`echoes` has each prompt's text, for `echo`.

    An echoed prompt is its choices' first piece: sent at once, or, when its logprobs are wanted, with them.
    Pieces that come before those logprobs (a sibling of the scored sequence may be faster) wait for them.
    """

    def __init__(
        self,
        body: CompletionBody,
        request: GenerationRequest,
        model: str,
        tokenizer: TextTokenizer,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(body, request, model, tokenizer)
        self._wanted = body
        self._echoes = echoes
        self._logprobs: dict[int, LegacyLogprobs] = {}
        self._unscored = set(range(len(request.prompts))) if body.echo and body.logprobs is not None else set[int]()
        self._waiting: list[Piece] = []

    def _opening(self) -> Iterator[Piece]:
        if self._wanted.echo and self._wanted.logprobs is None:
            for index in range(self.request.sequences):
                yield Piece(index, self._echoes[self._prompt_of(index)])

    def _pieces(self, event: Event) -> Iterator[Piece]:
        if isinstance(event, PromptScored) and event.prompt_index in self._unscored:
            yield from self._echo_scored(event)
        for piece in super()._pieces(event):
            if self._prompt_of(piece.index) in self._unscored:
                self._waiting.append(piece)
            else:
                yield piece

    def _echo_scored(self, event: PromptScored) -> Iterator[Piece]:
        self._unscored.remove(event.prompt_index)
        scored = score(self.request.prompts[event.prompt_index], event.logprobs)
        first = event.prompt_index * self.request.n
        for index in range(first, first + self.request.n):
            yield Piece(index, self._echoes[event.prompt_index], scored=scored)
            yield from (piece for piece in self._waiting if piece.index == index)

    def _chunk(self, pieces: Sequence[Piece], **more: Any) -> Completion:
        choices = [self._choice(piece) for piece in pieces]
        more = {**self._usage_so_far(), **self._tail, **more}
        return Completion(**self._head, object="text_completion", choices=choices, **more)

    def _whole(self, choices: Sequence[Piece], usage: Usage, scored: dict[int, PromptScored]) -> Completion:
        worded = [self._choice(piece, **self._scores(piece, scored)) for piece in choices]
        return Completion(**self._head, object="text_completion", choices=worded, usage=usage, **self._tail)

    def _choice(self, piece: Piece, **more: Any) -> CompletionChoice:
        if self._wanted.return_token_ids:
            more["token_ids"] = list(piece.token_ids)
            if self._first(piece):
                more["prompt_token_ids"] = list(self.request.prompts[self._prompt_of(piece.index)])
        logprobs = self._writer(piece.index).write(piece.scored) if piece.scored else None
        return CompletionChoice(index=piece.index, text=piece.text, logprobs=logprobs, **ending(piece), **more)

    def _writer(self, index: int) -> LegacyLogprobs:
        """The choice's own writer: offsets run on from chunk to chunk."""
        if index not in self._logprobs:
            wanted = self._wanted
            as_ids = wanted.return_tokens_as_token_ids
            self._logprobs[index] = LegacyLogprobs(self._tokenizer, wanted.logprobs or 0, as_ids)
        return self._logprobs[index]

    def _scores(self, piece: Piece, scored: dict[int, PromptScored]) -> dict[str, Any]:
        if self._wanted.prompt_logprobs is None:
            return {}
        prompt = self._prompt_of(piece.index)
        tokens = score(self.request.prompts[prompt], scored[prompt].logprobs)
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, tokens, self._wanted.prompt_logprobs)}

    def _prompt_of(self, index: int) -> int:
        return index // self.request.n
