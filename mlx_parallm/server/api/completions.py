"""`POST /v1/completions`: OpenAI's legacy completions, with vLLM's extensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import Depends
from pydantic import Field, PlainValidator, model_validator
from starlette.responses import Response

from mlx_parallm.core.requests import Event, GenerationRequest, PromptScored
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import AnswerObject, ChoicePiece, ChoiceWriter, ending
from mlx_parallm.server.api.bodies import (
    NO_LIMIT,
    UNSUPPORTED_OPTIONS,
    Candidates,
    GenerationBody,
    TokenLimit,
    TopLogprobs,
    widest,
)
from mlx_parallm.server.api.fields import FinishReasonText, Neutral, TokenId, WireOutput, is_token_ids, refused
from mlx_parallm.server.api.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprobs,
    prompt_logprobs,
    scored_prompt,
)
from mlx_parallm.server.body import json_body
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.request import RequestContext, compile_grammar, generation_request, longest_text, tokens_as_ids
from mlx_parallm.server.request_log import new_request_id
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

DEFAULT_MAX_TOKENS = 16
Prompt = str | list[int]

# ---- the body and the answer ---------------------------------------------------------------------


def prompts_of(value: object) -> list[Prompt]:
    """One text, one list of token ids, or a list of either, as a list. Raises the error of `refused` for others."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value) or all(is_token_ids(prompt) for prompt in value):
            return value
        if is_token_ids(value):
            return [value]
    raise refused("must be a string, or a list of strings, token ids or lists of token ids; no list may be empty")


_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1)]
Prompts = Annotated[
    list[Prompt],
    PlainValidator(prompts_of, json_schema_input_type=str | _Texts | _Ids | Annotated[list[_Ids], Field(min_length=1)]),
]


class CompletionBody(GenerationBody):
    """One or more prompts, and how to continue them."""

    IGNORED: ClassVar[frozenset[str]] = GenerationBody.IGNORED | {"parallel_tool_calls"}
    NEUTRAL: ClassVar[Neutral] = {**UNSUPPORTED_OPTIONS, "prompt_embeds": (), "suffix": ()}
    NULL_VALUES: ClassVar[Mapping[str, object]] = {"max_tokens": NO_LIMIT}  # as in vLLM

    prompt: Prompts
    """A text, a list of token ids, or a list of either. Each prompt gets `n` answers."""
    max_tokens: TokenLimit | None = None
    """Maximum number of tokens to generate: by default 16, or fewer if fewer fit. With null or -1, only the context
    limits the answer. With 0, nothing is generated, so `echo` or `prompt_logprobs` is required."""
    logprobs: TopLogprobs | None = None
    """Return the logprobs of the generated tokens and, at each position, of this many most likely tokens: at most 20,
    unless the operator allows more with `--max-logprobs`."""
    echo: bool = False
    """Whether each answer starts with its prompt; `logprobs` then covers the prompt too."""
    add_special_tokens: bool = True
    """Whether the tokenizer may add special tokens to a text. Token ids are used as they are."""

    @property
    def task_prompt(self) -> str | None:
        """The prompt, if it is one text."""
        only = self.prompt[0] if len(self.prompt) == 1 else None
        return only if isinstance(only, str) else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def default_max_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS

    @property
    def candidates(self) -> Candidates:
        return Candidates("logprobs", self.logprobs)

    @property
    def prompt_candidates(self) -> Candidates:
        scored = super().prompt_candidates
        return widest([scored, self.candidates]) if self.echo else scored

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refused("0 generates nothing: it needs echo or prompt_logprobs", "max_tokens")
        if self.max_tokens == 0 and self.collect_trajectory:
            raise refused("0 generates nothing that could be collected", "max_tokens")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise refused("cannot be combined with echo", "truncate_prompt_tokens")
        if self.episode_id is not None and len(self.prompt) > 1:
            raise refused("must be one prompt with episode_id: an episode has one answer a turn", "prompt")
        if self.stream and self.prompt_logprobs is not None:
            raise refused("not available with stream; use echo and logprobs", "prompt_logprobs")
        return self


class ProgramCompletionBody(CompletionBody):
    """A completion for a program that says itself how tokens are sampled, so that the model's defaults do not count."""

    MODEL_DEFAULTS: ClassVar[bool] = False


class CompletionChoice(WireOutput):
    """One answer, or what a chunk adds to it."""

    LONG: ClassVar[bool] = True

    index: int
    """The prompt's index times `n`, plus the sample's index."""
    text: str
    """The answer, or what a chunk adds to it."""
    logprobs: CompletionLogprobs | None
    """Logprobs of the tokens in `text`, if the request asked for them."""
    finish_reason: FinishReasonText | None
    """Why the answer ended; null in a chunk before the last."""
    stop_reason: str | int | None = None
    """The stop string that ended the answer, or the token of `stop_token_ids`."""
    token_ids: list[int] | None = None
    """The generated tokens."""
    prompt_token_ids: list[int] | None = None
    """The prompt's tokens; in a stream, in the first chunk of the choice."""
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt, its logprob and those of likely tokens, by token id; null for the first token."""


class Completion(AnswerObject):
    """The whole answer, or one chunk of a stream."""

    LONG: ClassVar[bool] = True

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    """All answers; in a chunk of a stream, the one that the chunk adds to, or none."""


# ---- the route -------------------------------------------------------------------------------------

router = Router()
Body = Annotated[CompletionBody, Depends(json_body(CompletionBody))]


@router.post(
    "/v1/completions",
    role=Role.INFERENCE,
    responses=streamable(Completion),
    examples={
        "continue a text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        "score a text": {"prompt": "Paris", "max_tokens": 0, "echo": True, "logprobs": 1},
        "several samples": {"prompt": "Once", "n": 2, "max_tokens": 4, "temperature": 0.8, "seed": 7},
        "token ids in and out": {
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    },
)
async def create_completion(body: Body, services: ServicesDep) -> Response:
    """Continues one or more prompts."""
    return GenerationResponse(services, body, len(body.prompt), partial(prepare, body))


def prepare(body: CompletionBody, context: RequestContext) -> CompletionWriter:
    """Tokenises the prompts, and builds the engine's request. Runs in a worker thread."""
    tokenizer = context.model.tokenizer
    echoed = body.prompt if body.echo else []
    return CompletionWriter(
        body=body,
        request=plan_completion(new_request_id("cmpl"), body, context),
        tokenizer=tokenizer,
        tokens_as_ids=tokens_as_ids(body, context.config),
        echoes=[prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in echoed],
    )


def plan_completion(request_id: str, body: CompletionBody, context: RequestContext) -> GenerationRequest:
    """Tokenises the prompts, and makes the engine's request. Raises the errors of `generation_request`, and
    InvalidRequestError if the grammar cannot be enforced."""
    model, collection, at_most = context.model, context.collection, longest_text(body, context.model.card)
    prompts = [
        model.tokenizer.encode(prompt, body.add_special_tokens, at_most) if isinstance(prompt, str) else prompt
        for prompt in body.prompt
    ]
    if collection is not None:
        context = replace(context, collection=replace(collection, prompt_text=body.task_prompt or ""))
    grammar = compile_grammar(*body.grammar, model.grammars) if body.grammar else None
    return generation_request(context, request_id, body, prompts, grammar)


@dataclass(kw_only=True, eq=False)
class CompletionWriter(ChoiceWriter[CompletionBody]):
    """Writes texts, echoed prompts and logprobs.

    An echoed prompt is the first piece of each of its choices. Without logprobs, it is sent at once. With logprobs, it
    is sent when they arrive, and the other pieces of its choices are held back until then.

    `echoes` has each prompt as the client sent it, or the text of its token ids. Without `echo`, it is empty.
    """

    echoes: Sequence[str]
    _logprobs: dict[int, CompletionLogprobsWriter] = field(default_factory=dict, init=False)
    _scored: set[int] = field(default_factory=set, init=False)
    _held: list[ChoicePiece] = field(default_factory=list, init=False)

    def _opening_pieces(self) -> Iterator[ChoicePiece]:
        if self.body.echo and self.body.logprobs is None:
            for index in range(self.request.sequences):
                yield ChoicePiece(index, self.echoes[self._prompt_of(index)])

    def _pieces(self, event: Event) -> Iterator[ChoicePiece]:
        echoes_logprobs = self.body.echo and self.body.logprobs is not None
        if echoes_logprobs and isinstance(event, PromptScored):
            yield from self._scored_echo(event)
        for piece in super()._pieces(event):
            if echoes_logprobs and self._prompt_of(piece.index) not in self._scored:
                self._held.append(piece)
            else:
                yield piece

    def _scored_echo(self, event: PromptScored) -> Iterator[ChoicePiece]:
        self._scored.add(event.prompt_index)
        echo = self.echoes[event.prompt_index]
        scored = scored_prompt(self.request.prompts[event.prompt_index], event.logprobs)
        first = event.prompt_index * self.request.n
        for index in range(first, first + self.request.n):
            yield ChoicePiece(index, echo, scored=scored)
            yield from (piece for piece in self._held if piece.index == index)

    def _chunk(self, pieces: Sequence[ChoicePiece], fields: dict[str, Any]) -> Completion:
        return Completion(object="text_completion", choices=[self._choice(piece) for piece in pieces], **fields)

    def _whole(
        self, choices: Sequence[ChoicePiece], scored: dict[int, PromptScored], fields: dict[str, Any]
    ) -> Completion:
        written = [self._choice(piece, **self._prompt_logprobs(piece, scored)) for piece in choices]
        return Completion(object="text_completion", choices=written, **fields)

    def _choice(self, piece: ChoicePiece, **more: Any) -> CompletionChoice:
        if self.body.return_token_ids:
            more["token_ids"] = list(piece.token_ids)
            if self._begins(piece):
                more["prompt_token_ids"] = list(self.request.prompts[self._prompt_of(piece.index)])
        logprobs = self._logprobs_of(piece.index).write(piece.scored) if piece.scored else None
        return CompletionChoice(index=piece.index, text=piece.text, logprobs=logprobs, **ending(piece), **more)

    def _logprobs_of(self, index: int) -> CompletionLogprobsWriter:
        """The choice's own writer, because offsets continue from chunk to chunk."""
        if index not in self._logprobs:
            top = self.body.logprobs or 0
            self._logprobs[index] = CompletionLogprobsWriter(self.tokenizer, top, self.tokens_as_ids)
        return self._logprobs[index]

    def _prompt_logprobs(self, piece: ChoicePiece, scored: dict[int, PromptScored]) -> dict[str, Any]:
        if self.body.prompt_logprobs is None:
            return {}
        prompt = self._prompt_of(piece.index)
        tokens = scored_prompt(self.request.prompts[prompt], scored[prompt].logprobs)
        return {"prompt_logprobs": prompt_logprobs(self.tokenizer, tokens, self.body.prompt_logprobs)}

    def _prompt_of(self, index: int) -> int:
        return index // self.request.n
