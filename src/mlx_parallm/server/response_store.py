"""The responses that clients may ask for again, or go on from."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from threading import RLock
from typing import Any

from mlx_parallm.server.errors import UnknownResponseError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and all the items that it was an answer to, those of earlier turns among them; both as JSON.
    Forgetting an earlier response breaks no later one."""

    response: bytes
    input_items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input_items)

    def items(self) -> list[dict[str, Any]]:
        """The conversation up to the response's end."""
        return [*json.loads(self.input_items), *json.loads(self.response)["output"]]


class ResponseStore:
    """Keeps the ones used last, in memory. Any thread.

    Invariant: at most `most` of them, of `most_bytes` in all, which are `held_bytes` now.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lock = RLock()
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps it, and forgets those used longest ago to make room; one larger than all the room is not kept."""
        if stored.size > self._most_bytes:
            return
        with self._lock:
            self._kept[response_id] = stored
            self.held_bytes += stored.size
            while len(self._kept) > self._most or self.held_bytes > self._most_bytes:
                self.forget(next(iter(self._kept)))

    def find(self, response_id: str, param: str) -> StoredResponse:
        """The response, as of now the last one used. Raises UnknownResponseError, naming `param`."""
        with self._lock:
            if response_id in self._kept:
                self._kept.move_to_end(response_id)
                return self._kept[response_id]
        raise UnknownResponseError(
            f"{param}: no such response; it was not stored, or is forgotten by now.", param=param
        )

    def forget(self, response_id: str) -> None:
        """The id must be one that `find` finds."""
        with self._lock:
            self.held_bytes -= self._kept.pop(response_id).size
