"""`POST /v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from mlx_parallm.core import AdapterRef, Collection, GenerationRequest
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.exchange import new_request_id
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.planning import Budget, plan
from mlx_parallm.server.respond.completions import CompletionAnswer
from mlx_parallm.server.selectors import choose
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.structured import compiled
from mlx_parallm.server.wire.common import NO_LIMIT
from mlx_parallm.server.wire.completions import Completion, CompletionBody
from mlx_parallm.server.wire.fields import Prompt

DEFAULT_MAX_TOKENS = 16

router = APIRouter()
Body = Annotated[CompletionBody, Depends(json_body(CompletionBody))]


@router.post("/v1/completions", responses=streamable(Completion), openapi_extra=request_body(CompletionBody))
async def create_completion(body: Body, services: ServicesDep) -> Response:
    """Continues prompts."""
    choice = choose(body, services.card.name)
    sequences = services.check_sequences(len(body.prompt), body.n)
    return GenerationResponse(services, choice, sequences, body, partial(prepare, body, services), body.stream)


def prepare(
    body: CompletionBody, services: Services, adapter: AdapterRef, collection: Collection | None
) -> CompletionAnswer:
    """Tokenises, and words the request for the engine. Runs in a worker thread."""
    prompts = [_ids(prompt, body, services) for prompt in body.prompt]
    request = plan(
        request_id=new_request_id("cmpl"),
        body=body,
        prompts=prompts,
        card=services.card,
        adapter=adapter,
        budget=_budget(body),
        top_logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        collection=collection,
        grammar=compiled(body, services.grammars),
    )
    return CompletionAnswer(body, request, services.card.name, services.tokenizer, _echoes(body, request, services))


def _budget(body: CompletionBody) -> Budget:
    return Budget(None, default=None) if body.max_tokens == NO_LIMIT else Budget(body.max_tokens, DEFAULT_MAX_TOKENS)


def _ids(prompt: Prompt, body: CompletionBody, services: Services) -> list[int]:
    """Ids are taken as they are: no silent BOS."""
    if not isinstance(prompt, str):
        return prompt
    return services.tokenizer.encode(prompt, body.add_special_tokens, services.card.context_length)


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """The most that `echo` with `logprobs`, or `prompt_logprobs`, needs of the engine."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((top for top in wanted if top is not None), default=None)


def _echoes(body: CompletionBody, request: GenerationRequest, services: Services) -> list[str]:
    """Each prompt's text: the client's own words, or what its ids spell."""
    if not body.echo:
        return []
    texts = zip(body.prompt, request.prompts, strict=True)
    return [text if isinstance(text, str) else services.tokenizer.decode(ids) for text, ids in texts]
