"""Keeps the responses that clients can retrieve and continue, with their whole conversations."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any

from mlx_parallm.server.api.responses.body import InputItem, MessageItem
from mlx_parallm.server.api.responses.output import new_id

ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}

ItemFields = dict[str, Any]
"""An input item with its id and status, as OpenAI lists it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and all its input items, both as JSON. The items include those of earlier turns, so a response stays
    whole when an earlier one is deleted. `owner`: the name of the key that made it. `added`: the ids of the items that
    no earlier turn had."""

    response: bytes
    input_items: bytes
    owner: str = ""
    added: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The size of both parts in bytes."""
        return len(self.response) + len(self.input_items)

    def items(self) -> list[ItemFields]:
        """The conversation up to the response's end."""
        return [*json.loads(self.input_items), *json.loads(self.response)["output"]]


class ResponseStore:
    """Keeps the most recently used responses in memory. Its methods can be called from any thread.

    To make room, the least recently used response of the key that holds the most is dropped, so no key's responses push
    out those of one that holds less.

    Invariant: it holds at most `most` responses and at most `most_bytes` bytes; `held_bytes` is the current number.
    """

    def __init__(self, most: int = 1000, most_bytes: int = 64 * 2**20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = RLock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._responses_of_items: dict[str, str] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, and drops others to make room. One that is larger than `most_bytes` is not stored."""
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._stored[response_id] = stored
            self._responses_of_items |= dict.fromkeys(stored.added, response_id)
            self.held_bytes += stored.size
            while (crowded := len(self._stored) > self._most) or self.held_bytes > self._most_bytes:
                held = Counter[str]()
                for each in self._stored.values():
                    held[each.owner] += 1 if crowded else each.size
                [(most, _)] = held.most_common(1)
                self.delete(next(name for name, each in self._stored.items() if each.owner == most))

    def find(self, response_id: str) -> StoredResponse | None:
        """The response, which becomes the most recently used one. None if it is not stored."""
        with self._lock:
            if response_id in self._stored:
                self._stored.move_to_end(response_id)
            return self._stored.get(response_id)

    def find_item(self, item_id: str) -> StoredResponse | None:
        """The response that added an item. None if it is not stored."""
        with self._lock:
            return self.find(self._responses_of_items.get(item_id, ""))

    def delete(self, response_id: str) -> None:
        """Deletes a response that is stored."""
        with self._lock:
            stored = self._stored.pop(response_id)
            self.held_bytes -= stored.size
            for item in stored.added:
                del self._responses_of_items[item]


def listed_item(item: InputItem) -> ItemFields:
    """An item that a client sent, as OpenAI lists it: with a new id and a status."""
    prefix = ID_PREFIXES.get(item.type, "item")
    fields = {"status": "completed", **item.model_dump(exclude_none=True), "id": new_id(prefix)}
    return {**fields, "content": [_text_part(item)]} if isinstance(item, MessageItem) else fields


def _text_part(item: MessageItem) -> dict[str, Any]:
    if item.role == "assistant":
        return {"type": "output_text", "text": item.content, "annotations": []}
    return {"type": "input_text", "text": item.content}
