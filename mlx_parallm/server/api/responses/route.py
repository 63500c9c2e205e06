"""`/v1/responses`: OpenAI's Responses API on top of chat. Responses are stored, so that clients can continue them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Path, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.splitter import Splitter
from mlx_parallm.errors import ContextLengthError, InvalidRequestError, shown
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.chat import ChatBody, plan_chat, prompt_of
from mlx_parallm.server.api.dialect import CONVERSATION, Dialect
from mlx_parallm.server.api.fields import WireQuery
from mlx_parallm.server.api.responses.body import (
    ITEM_LIST,
    MAX_ITEM_ID,
    ItemReference,
    ResponsesBody,
    messages_of,
    names_of_tools,
)
from mlx_parallm.server.api.responses.output import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseObject,
    ResponseWriter,
    empty_response,
    new_id,
)
from mlx_parallm.server.api.responses.store import ItemFields, StoredResponse, listed_item
from mlx_parallm.server.body import json_body
from mlx_parallm.server.errors import UnknownResponseError
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.request import RequestContext
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

EMPTY_CONVERSATION = StoredResponse(b'{"output":[]}', b"[]")
ANSWER_SHARE = 4
"""With truncation, the context's length divided by this stays free for an answer whose length is not limited."""
NAMES: Mapping[str, str] = {
    CONVERSATION: "input",
    r"response_format(\.json_schema)?": "text.format",
    "max_(completion_)?tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""See `Dialect.names`."""


class ResponseQuery(WireQuery):
    """The query of a request for a stored response."""

    stream: bool = False
    """Only false: a stored response is not streamed again."""
    starting_after: int | None = None
    """Not supported, because it needs `stream`."""
    include_obfuscation: bool = False
    """Accepted and ignored: stored responses are not streamed."""

    def check(self) -> None:
        """Raises InvalidRequestError if the events of the response are wanted, which are not kept."""
        if self.stream or self.starting_after is not None:
            name = "stream" if self.stream else "starting_after"
            raise InvalidRequestError(
                f"{name}: the events of a stored response are not kept, because no response runs in the background "
                "here; leave it out to get the whole response.",
                param=name,
            )


class InputItemsQuery(WireQuery):
    """The requested page of input items."""

    after: Annotated[str, Field(max_length=MAX_ITEM_ID)] | None = None
    """The id of an item: the page starts after it."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Maximum number of items of a page."""
    order: Literal["asc", "desc"] = "desc"
    """`asc`: oldest first. `desc`: newest first."""
    include: Annotated[list[str], Field(alias="include[]", max_length=16)] = Field(default_factory=list)
    """Accepted and ignored: items are always listed whole."""


router = Router()
ResponseId = Annotated[str, Path(description="The id of a stored response.")]
Body = Annotated[ResponsesBody, Depends(json_body(ResponsesBody))]


@router.post(
    "/v1/responses",
    role=Role.INFERENCE,
    responses=streamable(ResponseObject),
    examples={
        "a question": {"input": "What is the capital of France?", "max_output_tokens": 8},
        "items": {
            "input": [{"role": "user", "content": "What is the capital of France?"}],
            "instructions": "Be brief.",
            "max_output_tokens": 8,
            "store": False,
        },
        "as a stream": {"input": "Hello", "max_output_tokens": 8, "stream": True},
    },
)
async def create_response(body: Body, request: Request, services: ServicesDep) -> Response:
    """Answers a conversation. Unless `store` is false, the response is stored for the next turn."""
    if body.is_empty and not body.stream:
        return await _loaded(body, services)
    stored = _previous(body, services)
    holders = _holders(body, services)
    request.state.body_bytes += sum(each.size for each in (stored, *holders))
    task = partial(_as_chat, body, stored, holders)
    body, earlier, chat = await services.workers.run(request.state.body_bytes, task)
    return GenerationResponse(services, chat, 1, partial(prepare, body, chat, earlier, services))


@router.post(
    "/v1/responses/input_tokens",
    role=Role.INFERENCE,
    examples={"a question": {"input": "What is the capital of France?"}},
)
async def count_input_tokens(body: Body, request: Request, services: ServicesDep) -> InputTokens:
    """Counts the tokens of the prompt that `POST /v1/responses` would make of the same body. Generates nothing."""
    services.check_model(body.model)
    stored = _previous(body, services)
    holders = _holders(body, services)
    size = request.state.body_bytes + sum(each.size for each in (stored, *holders))
    async with services.model_for(body.model) as model:
        tokens = await services.workers.run(size, partial(_count_tokens, body, stored, holders, model))
    return InputTokens(object="response.input_tokens", input_tokens=tokens)


@router.get("/v1/responses/{response_id}/input_items", role=Role.INFERENCE)
async def list_input_items(
    response_id: ResponseId, services: ServicesDep, query: Annotated[InputItemsQuery, Query()]
) -> InputItems:
    """The input items of a stored response, including those of earlier turns."""
    stored = _stored(services, response_id, "response_id")
    return await services.workers.run(stored.size, partial(_page_of, stored, query))


@router.get("/v1/responses/{response_id}", role=Role.INFERENCE, response_model=ResponseObject)
async def get_response(
    response_id: ResponseId, services: ServicesDep, query: Annotated[ResponseQuery, Query()]
) -> Response:
    """A stored response, as it was when it ended."""
    query.check()
    stored = _stored(services, response_id, "response_id")
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", role=Role.INFERENCE)
async def delete_response(response_id: ResponseId, services: ServicesDep) -> DeletedResponse:
    """Deletes a stored response. Responses that continue it stay whole."""
    _stored(services, response_id, "response_id")
    services.responses.delete(response_id)
    return DeletedResponse(id=response_id, object="response", deleted=True)


async def _loaded(body: ResponsesBody, services: Services) -> Response:
    """The answer to an empty conversation: clients load a model so before they use it. The other fields are checked as
    for any conversation."""
    services.check_model(body.model)
    _dialect(body).translated(body.for_chat([{"role": "user", "content": ""}]))
    async with services.model_for(body.model) as model:
        response = empty_response(body, model.card.name)
    return Response(response.json_text(), media_type="application/json")


def prepare(
    body: ResponsesBody,
    chat: ChatBody,
    earlier: Sequence[ItemFields],
    services: Services,
    context: RequestContext,
) -> ResponseWriter:
    """Renders and tokenises the conversation, and builds the engine's request, as chat does. Runs in a worker thread.

    Args:
        chat: the whole conversation as a chat body.
        earlier: the items of earlier turns.
    """
    with _dialect(body).own_names():
        planned = plan_chat(new_id("resp"), _fitted(body, chat, context.model), services, context)
    given, owner = [*map(listed_item, body.input)], context.key.name
    keep = partial(_store, services, earlier, given, owner) if body.store else lambda _: None
    return ResponseWriter(
        body=body,
        request=planned.request,
        splitter=Splitter(planned.syntax),
        keep=keep,
        watch=planned.watch,
    )


def _store(
    services: Services,
    earlier: Sequence[ItemFields],
    given: Sequence[ItemFields],
    owner: str,
    response: ResponseObject,
) -> None:
    """Stores a response. `earlier` and `given` are the items of earlier turns, and those of this one. `owner`: the name
    of the key that may read it."""
    input_items = json.dumps([*earlier, *given], ensure_ascii=False).encode("utf-8")
    added = (*(item["id"] for item in given), *(item.id for item in response.output))
    stored = StoredResponse(response.json_text().encode("utf-8"), input_items, owner, added)
    services.responses.put(response.id, stored)


def _page_of(stored: StoredResponse, query: InputItemsQuery) -> InputItems:
    """The page of the response's input items that `query` asks for.

    Raises:
        InvalidRequestError: no item has the id `after`.
    """
    items: list[ItemFields] = json.loads(stored.input_items)
    if query.order == "desc":
        items.reverse()
    places = {item["id"]: place for place, item in enumerate(items)}
    if query.after is not None and query.after not in places:
        raise InvalidRequestError("after: no item of this response has that id.", param="after")
    start = 0 if query.after is None else places[query.after] + 1
    data = items[start : start + query.limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    has_more = start + query.limit < len(items)
    return InputItems(object="list", data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)


def _stored(services: Services, response_id: str, param: str) -> StoredResponse:
    """The stored response. Raises UnknownResponseError, which names `param`, if it is not stored, or if another
    key made it, so that this one may not read it."""
    stored = services.responses.find(response_id)
    if stored is None or not services.key.reader.may_read(stored.owner):
        raise UnknownResponseError(
            f"{param}: no such response; it was not stored, or newer ones took its place.", param=param
        )
    return stored


def _previous(body: ResponsesBody, services: Services) -> StoredResponse:
    """The response that the new one continues. Raises UnknownResponseError if it is not stored."""
    if body.previous_response_id is None:
        return EMPTY_CONVERSATION
    return _stored(services, body.previous_response_id, "previous_response_id")


def _holders(body: ResponsesBody, services: Services) -> frozenset[StoredResponse]:
    """The responses that have the items to which `input` refers.

    Raises:
        UnknownResponseError: one is not stored, or the key may not read it.
    """
    holders = set()
    for index, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            stored = services.responses.find_item(item.id)
            if stored is None or not services.key.reader.may_read(stored.owner):
                param = f"input[{index}].id"
                advice = f"no stored response has an item with the id {shown(item.id)}; send the item itself."
                raise UnknownResponseError(f"{param}: {advice}", param=param)
            holders.add(stored)
    return frozenset(holders)


def _with_items(body: ResponsesBody, holders: Iterable[StoredResponse]) -> ResponsesBody:
    """The body with the items to which its input refers."""
    found = {item["id"]: item for stored in holders for item in stored.items()}
    given = [found[item.id] if isinstance(item, ItemReference) else item for item in body.input]
    return body.model_copy(update={"input": ITEM_LIST.validate_python(given)}) if found else body


def _as_chat(
    body: ResponsesBody, previous: StoredResponse, holders: frozenset[StoredResponse]
) -> tuple[ResponsesBody, list[ItemFields], ChatBody]:
    """The body with the items to which it refers, the items of earlier turns, and the whole conversation as a chat
    body. Runs in a worker thread.

    Raises:
        InvalidRequestError: the chat body is not valid; the error has this API's name of the field.
    """
    body = _with_items(body, holders)
    earlier = previous.items()
    messages = messages_of(ITEM_LIST.validate_python(earlier))
    return body, earlier, _dialect(body).translated(body.for_chat(messages))


def _count_tokens(
    body: ResponsesBody, previous: StoredResponse, holders: frozenset[StoredResponse], model: ServedModel
) -> int:
    """The length of the prompt. Runs in a worker thread."""
    body, _, chat = _as_chat(body, previous, holders)
    with _dialect(body).own_names():
        return len(prompt_of(_fitted(body, chat, model), model))


def _dialect(body: ResponsesBody) -> Dialect[ChatBody]:
    return Dialect(ChatBody, {**names_of_tools(body.offered()), **NAMES})


# ---- truncation ------------------------------------------------------------------------------------


def _fitted(body: ResponsesBody, chat: ChatBody, model: ServedModel) -> ChatBody:
    """The chat body, without the messages that `truncation` drops; see `ResponsesBody.truncation`."""
    if body.truncation == "disabled":
        return chat
    return _shortened(chat, partial(prompt_of, model=model), model.card.context_length)


def _shortened(chat: ChatBody, prompt: Callable[[ChatBody], list[int]], context: int) -> ChatBody:
    """`chat` without its oldest messages: as many are left out as needed, so that the rest fits `context` tokens.

    System messages at the beginning and the last message stay, and results of tools go together with their calls. If
    even these do not fit, the result is still too long. Renders a number of prompts that is logarithmic in the number
    of messages.
    """

    def fits(start: int, answer: int) -> bool:
        try:
            return len(prompt(_without(chat, first, start))) + answer <= context
        except ContextLengthError:
            return False

    messages = chat.messages
    first = next((i for i, message in enumerate(messages) if message.role not in ("system", "developer")), 0)
    starts = [i for i in range(first + 1, len(messages)) if messages[i].role != "tool"]
    if not starts or fits(first, chat.max_completion_tokens or 1):
        return chat
    answer = chat.max_completion_tokens or context // ANSWER_SHARE
    fitting = bisect_left(starts, True, key=lambda start: fits(start, answer))
    return _without(chat, first, starts[min(fitting, len(starts) - 1)])


def _without(chat: ChatBody, start: int, end: int) -> ChatBody:
    """`chat` without its messages from `start` to before `end`."""
    return chat.model_copy(update={"messages": [*chat.messages[:start], *chat.messages[end:]]})
