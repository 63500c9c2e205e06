"""`POST /inference/v1/generate`: token ids in, token ids and their logprobs out, as in vLLM. And `POST
/v1/chat/completions/render`, which makes such a request of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.requests import PromptScored
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import AnswerObject, ChoicePiece, ChoiceWriter, ending
from mlx_parallm.server.api.bodies import (
    NO_LIMIT,
    UNSUPPORTED_OPTIONS,
    CollectableBody,
    Priority,
    SamplingFields,
    StreamOptions,
    TokenLimit,
    TopLogprobs,
)
from mlx_parallm.server.api.chat import ChatBody, prompt_of
from mlx_parallm.server.api.completions import CompletionBody, ProgramCompletionBody, plan_completion
from mlx_parallm.server.api.dialect import Dialect
from mlx_parallm.server.api.fields import FinishReasonText, Neutral, NonEmptyTokenIds, WireOutput
from mlx_parallm.server.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs, scored_prompt
from mlx_parallm.server.body import json_body
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.request import RequestContext, adapter_named_by, select_adapter
from mlx_parallm.server.request_log import new_request_id
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

MAX_REQUEST_ID = 256
WITHOUT_EFFECT = frozenset({"detokenize", "extra_args", "output_kind", "routed_experts_prompt_start"})
"""vLLM's sampling parameters that change nothing here: how outputs are batched, and what mixtures of experts report."""


class TokenSampling(SamplingFields):
    """vLLM's sampling parameters."""

    IGNORED: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"reasoning_effort"}
    NEUTRAL: ClassVar[Neutral] = {**UNSUPPORTED_OPTIONS, "flat_logprobs": (False,), "logprob_token_ids": ()}

    max_tokens: TokenLimit | None = None
    """Maximum number of tokens to generate. If it is left out, only the context limits the answer. With 0, nothing is
    generated, so `prompt_logprobs` is required."""
    logprobs: TopLogprobs | None = None
    """Return the logprobs of the generated tokens and, at each position, of this many most likely tokens: at most 20,
    unless the operator allows more with `--max-logprobs`."""


class TokensBody(CollectableBody):
    """The tokens of a prompt, and how to continue them."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"kv_transfer_params", "vllm_xargs"})
    NEUTRAL: ClassVar[Neutral] = {"content_parts": (), "features": ()}

    token_ids: NonEmptyTokenIds
    """The token ids of the prompt, used as they are."""
    sampling_params: TokenSampling = TokenSampling()
    """How to continue them."""
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID)] | None = None
    """Returned with the answer. The server's own id of the request is in the header `x-request-id`."""
    stream: bool = False
    """Whether the answer is sent as server-sent events instead of one body."""
    stream_options: StreamOptions = StreamOptions()
    """What a stream reports about usage. It has no effect without `stream`."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    return_token_ids: bool = False
    """Whether the answer has the token ids of the prompt too."""

    def for_completion(self) -> dict[str, Any]:
        """The same request as the fields of a completion."""
        sampling = self.sampling_params
        return {
            **self.sent_collection(),
            **sampling.sent_sampling(),
            "prompt": self.token_ids,
            "max_tokens": NO_LIMIT if sampling.max_tokens is None else sampling.max_tokens,
            "logprobs": sampling.logprobs,
            "priority": self.priority,
            "stream": self.stream,
            "stream_options": self.stream_options.model_dump(),
            "return_token_ids": True,
        }


class TokensChoice(WireOutput):
    """One answer, or what a chunk adds to it."""

    LONG: ClassVar[bool] = True

    index: int
    """The answer's position among the `n`."""
    token_ids: list[int]
    """The generated tokens, with the one that ended the answer."""
    logprobs: ChatLogprobs | None
    """Logprobs of these tokens, if the request asked for them. Tokens are written as `token_id:<id>`."""
    finish_reason: FinishReasonText | None
    """Why the answer ended; null in a chunk before the last."""
    stop_reason: str | int | None = None
    """The stop string that ended the answer, or the token of `stop_token_ids`."""


class TokenCompletion(AnswerObject):
    """The whole answer, or one chunk of a stream."""

    LONG: ClassVar[bool] = True

    object: Literal["token_completion"]
    request_id: str
    """The `request_id` of the request, or the server's own."""
    choices: list[TokensChoice]
    """All answers; in a chunk of a stream, the one that the chunk adds to, or none."""
    prompt_token_ids: list[int] | None = None
    """The tokens of the prompt, with `return_token_ids`; in a stream, in the first chunk."""
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt, its logprob and those of likely tokens, by token id; null for the first token, and
    null instead of the list if the request did not ask for them."""


class RenderedChat(WireOutput):
    """A conversation as a body for `/inference/v1/generate`."""

    LONG: ClassVar[bool] = True

    token_ids: list[int]
    """The token ids of the rendered conversation."""
    sampling_params: dict[str, Any]
    """The sampling fields of the request."""
    model: str | None = None
    """As in the request."""
    lora_adapter: str | None = None
    """As in the request."""
    cache_salt: str | None = None
    """As in the request."""
    priority: int
    """As in the request."""
    stream: bool
    """As in the request."""


DIALECT = Dialect(
    ProgramCompletionBody,
    {
        "prompt": "token_ids",
        **{name: f"sampling_params.{name}" for name in (*SamplingFields.model_fields, "max_tokens", "logprobs")},
    },
)

router = Router()
Body = Annotated[TokensBody, Depends(json_body(TokensBody))]
Chat = Annotated[ChatBody, Depends(json_body(ChatBody))]

# ---- tokens in, tokens out -------------------------------------------------------------------------


@router.post(
    "/inference/v1/generate",
    role=Role.INFERENCE,
    responses=streamable(TokenCompletion),
    examples={
        "token ids": {
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 4, "logprobs": 1, "stop_token_ids": [2]},
        },
        "score tokens": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}},
    },
)
async def generate_tokens(body: Body, services: ServicesDep) -> Response:
    """Continues the tokens of a prompt. No text is tokenised, so the turns of a conversation can extend each other
    exactly. The header `X-Session-ID`, which clients send for each rollout, has no effect."""
    completion = DIALECT.translated(body.for_completion())
    return GenerationResponse(services, completion, 1, partial(prepare, body, completion))


@DIALECT.own_names()
def prepare(body: TokensBody, completion: CompletionBody, context: RequestContext) -> TokensWriter:
    """Makes the engine's request. Runs in a worker thread."""
    request = plan_completion(new_request_id("tokens"), completion, context)
    return TokensWriter(body=completion, request=request, tokenizer=context.model.tokenizer, sent=body)


@dataclass(kw_only=True, eq=False)
class TokensWriter(ChoiceWriter[CompletionBody]):
    """Writes choices as token ids. `sent`: the body as the client sent it."""

    sent: TokensBody
    _opened: bool = field(default=False, init=False)

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "request_id": self.sent.request_id or self.request.request_id}

    def _chunk(self, pieces: Sequence[ChoicePiece], fields: dict[str, Any]) -> TokenCompletion:
        ids, self._opened = {} if self._opened else self._prompt_ids(), True
        return self._answer(pieces, {**ids, **fields})

    def _whole(
        self, choices: Sequence[ChoicePiece], scored: dict[int, PromptScored], fields: dict[str, Any]
    ) -> TokenCompletion:
        fields["prompt_logprobs"] = None
        if (top := self.body.prompt_logprobs) is not None:
            tokens = scored_prompt(self.request.prompts[0], scored[0].logprobs)
            fields["prompt_logprobs"] = prompt_logprobs(self.tokenizer, tokens, top)
        return self._answer(choices, {**self._prompt_ids(), **fields})

    def _answer(self, pieces: Sequence[ChoicePiece], fields: dict[str, Any]) -> TokenCompletion:
        choices = [self._choice(piece) for piece in pieces]
        return TokenCompletion(object="token_completion", choices=choices, **fields)

    def _choice(self, piece: ChoicePiece) -> TokensChoice:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = chat_logprobs(self.tokenizer, piece.scored, self.body.logprobs, as_ids=True)
        return TokensChoice(index=piece.index, token_ids=list(piece.token_ids), logprobs=logprobs, **ending(piece))

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.request.prompts[0])} if self.sent.return_token_ids else {}


# ---- a conversation as tokens ----------------------------------------------------------------------


@router.post(
    "/v1/chat/completions/render",
    role=Role.INFERENCE,
    response_model=RenderedChat,
    examples={
        "a question": {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 4,
            "logprobs": True,
        }
    },
)
async def render_chat(body: Chat, request: Request, services: ServicesDep) -> Response:
    """The request that a chat is made of: the tokens of the conversation and the sampling parameters, as a body for
    `/inference/v1/generate`. Nothing is generated."""
    selector = select_adapter(body, services.model_names)
    if selector.folder is None:
        named, param = (body.model, "model") if selector.name is None else (selector.name, selector.param)
        with adapter_named_by(param, named):
            services.check_model(named)
    async with services.model_for(body.model, selector.name) as model:
        rendered = await services.workers.run(request.state.body_bytes, partial(_render, body, model))
    return Response(rendered.json_text(), media_type="application/json")


def _render(body: ChatBody, model: ServedModel) -> RenderedChat:
    """Runs in a worker thread.

    Raises:
        InvalidRequestError: the answer would follow a grammar or bound its reasoning, which tokens cannot ask for.
    """
    if body.thinking_budget is not None:
        name, _ = body.thinking_budget
        raise InvalidRequestError(f"{name}: a rendered request has no bound on its reasoning; leave it out", param=name)
    if body.compiles:
        param = body.grammar[0] if body.grammar else "tool_choice"
        raise InvalidRequestError(f"{param}: a rendered request has no grammar; leave it out", param=param)
    sampling = {**body.sent_sampling(), "max_tokens": body.token_limit, "logprobs": body.candidates.number}
    names = [name for name in ("model", "lora_adapter", "cache_salt") if name in body.model_fields_set]
    return RenderedChat(
        token_ids=body.given_prompt or prompt_of(body, model),
        sampling_params={name: value for name, value in sampling.items() if value is not None},
        priority=body.priority,
        stream=body.stream,
        **{name: getattr(body, name) for name in names},
    )
