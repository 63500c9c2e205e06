"""Stored responses, which clients can retrieve and continue, and their input items."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.fields import WireQuery
from mlx_parallm.server.api.responses.items import InputItem, MessageItem
from mlx_parallm.server.api.responses.objects import InputItems, new_id
from mlx_parallm.server.errors import UnknownResponseError

MAX_ITEM_ID = 128
ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}

ItemFields = dict[str, Any]
"""An input item with its id and status, as OpenAI lists it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and all its input items, both as JSON. The items include those of earlier turns, so a response stays
    whole when an earlier one is deleted."""

    response: bytes
    input_items: bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.response) + len(self.input_items)

    def items(self) -> list[ItemFields]:
        """The conversation up to the response's end."""
        return [*json.loads(self.input_items), *json.loads(self.response)["output"]]


class ResponseStore:
    """Keeps the most recently used responses in memory. Its methods can be called from any thread.

    Invariant: it holds at most `most` responses, of `most_bytes` bytes in total; `held_bytes` is the current total.
    """

    def __init__(self, most: int = 1000, most_bytes: int = 64 * 2**20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = RLock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response and drops the least recently used ones to make room. One that is larger than all the room
        is not stored."""
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._stored[response_id] = stored
            self.held_bytes += stored.size
            while len(self._stored) > self._most or self.held_bytes > self._most_bytes:
                self.delete(next(iter(self._stored)))

    def find(self, response_id: str, param: str) -> StoredResponse:
        """The response, which becomes the most recently used one. Raises UnknownResponseError, naming `param`."""
        with self._lock:
            if response_id in self._stored:
                self._stored.move_to_end(response_id)
                return self._stored[response_id]
        raise UnknownResponseError(
            f"{param}: no such response; it was not stored, or newer ones took its place.", param=param
        )

    def delete(self, response_id: str) -> None:
        """Deletes a response that is stored."""
        with self._lock:
            self.held_bytes -= self._stored.pop(response_id).size


def listed_item(item: InputItem) -> ItemFields:
    """An item that a client sent, with a new id and a status."""
    fields = {"status": "completed", **item.model_dump(exclude_none=True), "id": new_id(ID_PREFIXES[item.type])}
    if isinstance(item, MessageItem):
        return {**fields, "content": [_text_part(item)]}
    return {**fields, "summary": []} if item.type == "reasoning" else fields


def _text_part(item: MessageItem) -> dict[str, Any]:
    if item.role == "assistant":
        return {"type": "output_text", "text": item.content, "annotations": []}
    return {"type": "input_text", "text": item.content}


class InputItemsQuery(WireQuery):
    """The page of input items that is asked for."""

    after: Annotated[str, Field(max_length=MAX_ITEM_ID)] | None = None
    """The id of an item: the page starts after it."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Most items of a page."""
    order: Literal["asc", "desc"] = "desc"
    """`asc`: oldest first. `desc`: newest first."""
    include: Annotated[list[str], Field(alias="include[]", max_length=16)] = Field(default_factory=list)
    """Accepted and ignored: items are always listed whole."""


def page_of(stored: StoredResponse, query: InputItemsQuery) -> InputItems:
    """The page of the response's input items that `query` asks for.

    Raises:
        InvalidRequestError: no item has the id `after`.
    """
    items: list[ItemFields] = json.loads(stored.input_items)
    if query.order == "desc":
        items.reverse()
    start = 0 if query.after is None else _place_after(items, query.after)
    data = items[start : start + query.limit]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    has_more = start + query.limit < len(items)
    return InputItems(object="list", data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)


def _place_after(items: list[ItemFields], item_id: str) -> int:
    for place, item in enumerate(items):
        if item["id"] == item_id:
            return place + 1
    raise InvalidRequestError("after: no item of this response has that id.", param="after")
