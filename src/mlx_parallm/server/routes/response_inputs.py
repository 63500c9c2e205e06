"""What a response was or would be an answer to, and why none can be cancelled."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import ContextLengthError, InvalidRequestError, UnknownModelError
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.errors import UnknownResponseError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.respond.input_items import page
from mlx_parallm.server.response_store import StoredResponse
from mlx_parallm.server.routes.chat import prompt_of
from mlx_parallm.server.routes.responses import ResponseId, as_chat, fitted, own_words, stored_before
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.wire.response_object import InputItems, InputTokens, ResponseObject
from mlx_parallm.server.wire.responses import InputItemsQuery, ResponsesBody

router = APIRouter()
Body = Annotated[ResponsesBody, Depends(json_body(ResponsesBody))]


@router.get("/v1/responses/{response_id}/input_items", responses=raises(UnknownResponseError))
async def list_input_items(
    response_id: ResponseId, services: ServicesDep, query: Annotated[InputItemsQuery, Query()]
) -> InputItems:
    """The items that a stored response was an answer to, those of earlier turns among them."""
    stored = services.responses.find(response_id, "response_id")
    return await services.workers.run(stored.size, partial(page, stored.input_items, query))


@router.post(
    "/v1/responses/input_tokens",
    responses=raises(UnknownResponseError, UnknownModelError, ContextLengthError),
    openapi_extra=request_body(ResponsesBody),
)
async def count_input_tokens(body: Body, request: Request, services: ServicesDep) -> InputTokens:
    """How many tokens the same body would have as a prompt of `POST /v1/responses`. Nothing is generated."""
    services.check_model(body.model)
    stored = stored_before(body, services)
    counting = partial(_count, body, stored, services)
    tokens = await services.workers.run(request.state.body_bytes + stored.size, counting)
    return InputTokens(object="response.input_tokens", input_tokens=tokens)


@router.post(
    "/v1/responses/{response_id}/cancel",
    response_model=ResponseObject,
    responses=raises(InvalidRequestError, UnknownResponseError),
)
async def cancel_response(response_id: ResponseId, services: ServicesDep) -> Response:
    """Always an error, as OpenAI's for a response that was not made in the background, which none is here: close the
    connection of a response to end it."""
    services.responses.find(response_id, "response_id")
    raise InvalidRequestError(
        "response_id: only a response made in the background can be cancelled, and this server makes none; close the "
        "connection of a response to end it.",
        param="response_id",
    )


def _count(body: ResponsesBody, stored: StoredResponse, services: Services) -> int:
    """In a worker thread."""
    _, chat = as_chat(body, stored)
    with own_words():
        return len(prompt_of(fitted(body, chat, services), services))
