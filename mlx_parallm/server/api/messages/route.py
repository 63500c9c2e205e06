"""`/v1/messages`: Anthropic's Messages API on top of chat."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core import AdapterRef, CollectionSpec, ServedModel
from mlx_parallm.core.splitter import Splitter
from mlx_parallm.errors import ContextLengthError, UnknownModelError
from mlx_parallm.server.api.chat.route import plan_chat, prompt_of
from mlx_parallm.server.api.chat.schema import ChatBody
from mlx_parallm.server.api.chat.translated import chat_body, client_names
from mlx_parallm.server.api.messages.objects import MessageObject, TokenCount
from mlx_parallm.server.api.messages.schema import ConversationBody, CountTokensBody, MessagesBody
from mlx_parallm.server.api.messages.stream import MessageWriter
from mlx_parallm.server.errors import UnknownThreadError
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.http.body import json_body
from mlx_parallm.server.openapi.responses import raises, streamable
from mlx_parallm.server.services import Services, ServicesDep

OWN_NAMES: Mapping[str, str] = {
    "messages": "messages",
    "continue_final_message": "messages",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    ".function.parameters": ".input_schema",
    ".function": "",
}
"""Maps names of chat's fields to the names of the same fields here; see `client_names`."""

router = APIRouter()
Body = Annotated[MessagesBody, Depends(json_body(MessagesBody))]
CountBody = Annotated[CountTokensBody, Depends(json_body(CountTokensBody))]


@router.post("/v1/messages", responses=streamable(MessageObject))
async def create_message(body: Body, request: Request, services: ServicesDep) -> Response:
    """Answers a conversation, as Anthropic's API does. `max_tokens` that do not fit the context are lowered."""
    chat = await services.workers.run(request.state.body_bytes, partial(_as_chat, body))
    return GenerationResponse(services, chat, 1, partial(prepare, body, chat, services))


@router.post("/v1/messages/count_tokens", responses=raises(UnknownModelError, UnknownThreadError, ContextLengthError))
async def count_tokens(body: CountBody, request: Request, services: ServicesDep) -> TokenCount:
    """Counts the tokens of the prompt that `POST /v1/messages` would make of the same body. Generates nothing."""
    services.check_model(body.model)
    async with services.model_for(body.model) as model:
        tokens = await services.workers.run(request.state.body_bytes, partial(_count_tokens, body, model))
    return TokenCount(input_tokens=tokens)


def prepare(
    body: MessagesBody,
    chat: ChatBody,
    services: Services,
    model: ServedModel,
    adapter: AdapterRef,
    collection: CollectionSpec | None,
) -> MessageWriter:
    """Renders and tokenises the conversation, and builds the engine's request, as chat does. Runs in a worker thread.

    Args:
        chat: the conversation as a chat body.
    """
    request_id = f"msg_{uuid.uuid4().hex}"
    with _own_errors():
        planned = plan_chat(request_id, chat, services, model, adapter, collection, body.max_tokens)
    return MessageWriter(
        request=planned.request, model=model.card.name, splitter=Splitter(planned.syntax), watch=planned.watch
    )


def _count_tokens(body: ConversationBody, model: ServedModel) -> int:
    """The length of the prompt. Runs in a worker thread."""
    chat = _as_chat(body)
    with _own_errors():
        return len(prompt_of(chat, model))


def _as_chat(body: ConversationBody) -> ChatBody:
    """The conversation as a chat body. Runs in a worker thread.

    Raises:
        UnknownThreadError: the server should know what was said before.
        InvalidRequestError: the chat body is not valid; the error has this API's name of the field.
    """
    if body.thread and body.thread.get("type") != "create":
        raise UnknownThreadError("This server keeps no threads; send the whole conversation in messages.", "thread")
    return chat_body(body.for_chat(), OWN_NAMES)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Errors that leave the block have this API's names of the fields. One about the length of the prompt begins as
    Anthropic's does, because clients look for it and then shorten the conversation."""
    try:
        with client_names(OWN_NAMES):
            yield
    except ContextLengthError as error:
        raise ContextLengthError(f"prompt is too long: {error}", param=error.param) from None
