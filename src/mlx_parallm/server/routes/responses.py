"""`/v1/responses`: the chat path, in the words of OpenAI's Responses API, with a memory of conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core import AdapterRef, Collection
from mlx_parallm.errors import RequestError
from mlx_parallm.server.body import first_fault, json_body, request_body
from mlx_parallm.server.errors import UnknownResponseError
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import raises, streamable
from mlx_parallm.server.respond.input_items import kept
from mlx_parallm.server.respond.response_items import new_id
from mlx_parallm.server.respond.responses import ResponsesAnswer
from mlx_parallm.server.response_store import StoredResponse
from mlx_parallm.server.routes.chat import planned, prompt_of
from mlx_parallm.server.selectors import choose
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.truncation import shortened
from mlx_parallm.server.wire.chat import ChatBody
from mlx_parallm.server.wire.response_items import ITEM_LIST, messages_of
from mlx_parallm.server.wire.response_object import DeletedResponse, ResponseObject
from mlx_parallm.server.wire.responses import ResponseQuery, ResponsesBody, own_name

SEQUENCES = 1
KeptItem = dict[str, Any]
NOTHING_BEFORE = StoredResponse(b'{"output":[]}', b"[]")

router = APIRouter()
ResponseId = Annotated[str, Path(description="Of a stored response.")]
Body = Annotated[ResponsesBody, Depends(json_body(ResponsesBody))]


@router.post(
    "/v1/responses",
    responses=streamable(ResponseObject, UnknownResponseError),
    openapi_extra=request_body(ResponsesBody),
)
async def create_response(body: Body, request: Request, services: ServicesDep) -> Response:
    """Answers a conversation, and keeps it for the next turn unless `store` is false."""
    stored = stored_before(body, services)
    request.state.body_bytes += stored.size
    earlier, chat = await services.workers.run(request.state.body_bytes, partial(as_chat, body, stored))
    choice = choose(chat, services.card.name)
    answering = partial(prepare, body, chat, earlier, services)
    return GenerationResponse(services, choice, SEQUENCES, chat, answering, body.stream)


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, responses=raises(UnknownResponseError))
async def get_response(
    response_id: ResponseId, services: ServicesDep, query: Annotated[ResponseQuery, Query()]
) -> Response:
    """A stored response, as it was when it ended."""
    stored = services.responses.find(response_id, "response_id")
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", responses=raises(UnknownResponseError))
async def delete_response(response_id: ResponseId, services: ServicesDep) -> DeletedResponse:
    """Forgets a stored response. Those that went on from it stay whole."""
    services.responses.find(response_id, "response_id")
    services.responses.forget(response_id)
    return DeletedResponse(id=response_id, object="response", deleted=True)


def prepare(
    body: ResponsesBody,
    chat: ChatBody,
    earlier: Sequence[KeptItem],
    services: Services,
    adapter: AdapterRef,
    collection: Collection | None,
) -> ResponsesAnswer:
    """Chat's request and reading, under a response's id. Runs in a worker thread."""
    with own_words():
        chat = fitted(body, chat, services)
        request, reading = planned(chat, services, adapter, collection, new_id("resp"))
    keep = partial(_keep, services, [*earlier, *map(kept, body.input)]) if body.store else _forget
    return ResponsesAnswer(body, chat, request, services.card.name, reading.splitter(), keep)


def fitted(body: ResponsesBody, chat: ChatBody, services: Services) -> ChatBody:
    """What of the conversation is read; see `ResponsesBody.truncation`."""
    if body.truncation == "disabled":
        return chat
    return shortened(chat, partial(prompt_of, services=services), services.card.context_length)


def stored_before(body: ResponsesBody, services: Services) -> StoredResponse:
    """The response that this one goes on from. Raises UnknownResponseError."""
    if body.previous_response_id is None:
        return NOTHING_BEFORE
    return services.responses.find(body.previous_response_id, "previous_response_id")


def as_chat(body: ResponsesBody, stored: StoredResponse) -> tuple[list[KeptItem], ChatBody]:
    """The items so far, and the conversation with this turn as a chat. In a worker thread.

    Raises:
        InvalidRequestError: chat finds a fault; it is named as the client knows it.
    """
    earlier = stored.items()
    messages = messages_of(ITEM_LIST.validate_python(earlier))
    with own_words():
        try:
            return earlier, ChatBody.model_validate(body.for_chat(messages))
        except ValidationError as error:
            raise first_fault(error) from None


@contextmanager
def own_words() -> Iterator[None]:
    """While the block runs, an error that names a field of chat's names ours."""
    try:
        yield
    except RequestError as error:
        if error.param is None:
            raise
        named = own_name(error.param)
        raise type(error)(str(error).replace(error.param, named), param=named) from None


def _keep(services: Services, items: Sequence[KeptItem], response: ResponseObject) -> None:
    asked = json.dumps(items, ensure_ascii=False).encode("utf-8")
    services.responses.put(response.id, StoredResponse(response.json_text().encode("utf-8"), asked))


def _forget(_: ResponseObject) -> None:
    """What is not to be stored."""
