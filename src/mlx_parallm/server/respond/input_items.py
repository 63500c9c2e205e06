"""Items of a conversation as they are kept, and listed by `GET /v1/responses/{id}/input_items`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.respond.response_items import new_id
from mlx_parallm.server.wire.response_items import InputItem, MessageItem
from mlx_parallm.server.wire.response_object import InputItems
from mlx_parallm.server.wire.responses import InputItemsQuery

PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def kept(item: InputItem) -> dict[str, Any]:
    """An item that a client sent, as OpenAI lists it: with an id of ours and a status."""
    fields = {"status": "completed", **item.model_dump(exclude_none=True), "id": new_id(PREFIXES[item.type])}
    if isinstance(item, MessageItem):
        return {**fields, "content": [_text(item)]}
    return {**fields, "summary": []} if item.type == "reasoning" else fields


def _text(item: MessageItem) -> dict[str, Any]:
    if item.role == "assistant":
        return {"type": "output_text", "text": item.content, "annotations": []}
    return {"type": "input_text", "text": item.content}


def page(input_items: bytes, query: InputItemsQuery) -> InputItems:
    """The part of the list that is asked for.

    Raises:
        InvalidRequestError: no item has the id `after`.
    """
    items: list[dict[str, Any]] = json.loads(input_items)
    if query.order == "desc":
        items.reverse()
    start = 0 if query.after is None else _after(items, query.after)
    data = items[start : start + query.limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    has_more = start + query.limit < len(items)
    return InputItems(object="list", data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)


def _after(items: list[dict[str, Any]], item_id: str) -> int:
    for place, item in enumerate(items):
        if item["id"] == item_id:
            return place + 1
    raise InvalidRequestError("after: no item of this response has that id.", param="after")
