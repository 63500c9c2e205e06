"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from mlx_parallm.core import AdapterRef, Collection, GenerationRequest
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.calling import Reading, callable_tools, grammar_of, reading_of
from mlx_parallm.server.conversation import rendered
from mlx_parallm.server.exchange import new_request_id
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.planning import Budget, plan
from mlx_parallm.server.respond.chat import ChatAnswer
from mlx_parallm.server.selectors import choose
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.wire.chat import ChatBody, ChatCompletion

router = APIRouter()
Body = Annotated[ChatBody, Depends(json_body(ChatBody))]


@router.post("/v1/chat/completions", responses=streamable(ChatCompletion), openapi_extra=request_body(ChatBody))
async def create_chat_completion(body: Body, services: ServicesDep) -> Response:
    """Answers a conversation, rendered with the model's own chat template."""
    choice = choose(body, services.card.name)
    sequences = services.check_sequences(1, body.n)
    return GenerationResponse(services, choice, sequences, body, partial(prepare, body, services), body.stream)


def prepare(body: ChatBody, services: Services, adapter: AdapterRef, collection: Collection | None) -> ChatAnswer:
    """Runs in a worker thread."""
    request, reading = planned(body, services, adapter, collection, new_request_id("chatcmpl"))
    return ChatAnswer(body, request, services.card.name, services.tokenizer, reading.splitter)


def planned(
    body: ChatBody, services: Services, adapter: AdapterRef, collection: Collection | None, request_id: str
) -> tuple[GenerationRequest, Reading]:
    """Renders and tokenises: what the engine is asked for, and how its text is to be read."""
    prompt = prompt_of(body, services)
    reading = reading_of(body, prompt, services.tokenizer)
    request = plan(
        request_id=request_id,
        body=body,
        prompts=[prompt],
        card=services.card,
        adapter=adapter,
        budget=Budget(body.max_completion_tokens or body.max_tokens, default=None),
        top_logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        collection=collection,
        grammar=grammar_of(body, reading, services.grammars),
        spelled=reading.spelled,
    )
    return request, reading


def prompt_of(body: ChatBody, services: Services) -> list[int]:
    """The conversation's token ids. Runs in a worker thread. Raises ContextLengthError: it is too long by far."""
    return rendered(
        [message.for_template() for message in body.messages],
        callable_tools(body),
        services.tokenizer,
        body.add_generation_prompt,
        body.chat_template_kwargs.variables(),
        services.card.context_length,
    )
