"""A response's output as it grows: parts of a text become items, and the events that tell of them.

    reasoning  added, content_part.added, reasoning_text.delta …, reasoning_text.done, content_part.done, done
    message    added, content_part.added, output_text.delta …, output_text.done, content_part.done, done
    call       added, function_call_arguments.delta …, function_call_arguments.done, done

One item is open at a time: a part of another kind ends it.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from mlx_parallm.server.respond.parts import CallPart, Part
from mlx_parallm.server.wire.response_object import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)

Said = tuple[str, dict[str, Any]]
"""An event's type, and its fields but the number."""


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class Output:
    """The items of one response: `done`, and the one that parts are added to now."""

    def __init__(self) -> None:
        self.done: list[OutputItem] = []
        self._open: _Growing | None = None

    def add(self, part: Part) -> Iterator[Said]:
        if self._open is None or not self._open.takes(part):
            yield from self.close("completed")
            self._open = _growing(part, len(self.done))
            yield from self._open.opened()
        yield from self._open.more(part)

    def close(self, status: ItemStatus) -> Iterator[Said]:
        """Ends the item that is open, if there is one."""
        if self._open is not None:
            yield from self._open.closed(status)
            self.done.append(self._open.item(status))
            self._open = None


class _Growing(ABC):
    PREFIX: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.id = new_id(self.PREFIX)
        self.where: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self._said: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._said)

    @abstractmethod
    def takes(self, part: Part) -> bool:
        """Whether the part goes on with this item."""

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it is now; in progress, it has no content yet."""

    @abstractmethod
    def more(self, part: Part) -> Iterator[Said]: ...

    def opened(self) -> Iterator[Said]:
        yield "response.output_item.added", self._told("in_progress")

    def closed(self, status: ItemStatus) -> Iterator[Said]:
        yield "response.output_item.done", self._told(status)

    def _told(self, status: ItemStatus) -> dict[str, Any]:
        return {"output_index": self.where["output_index"], "item": self.item(status)}


class _GrowingText(_Growing):
    """An item of one text."""

    EVENT: ClassVar[str]
    MORE: ClassVar[dict[str, Any]] = {}

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.where |= {"content_index": 0}

    @abstractmethod
    def part(self) -> OutputText | ReasoningText: ...

    def opened(self) -> Iterator[Said]:
        yield from super().opened()
        yield "response.content_part.added", {**self.where, "part": self.part()}

    def more(self, part: Part) -> Iterator[Said]:
        if text := part.reasoning or part.text:
            self._said.append(text)
            yield f"{self.EVENT}.delta", {**self.where, "delta": text, **self.MORE}

    def closed(self, status: ItemStatus) -> Iterator[Said]:
        yield f"{self.EVENT}.done", {**self.where, "text": self.text, **self.MORE}
        yield "response.content_part.done", {**self.where, "part": self.part()}
        yield from super().closed(status)


class _GrowingReasoning(_GrowingText):
    PREFIX, EVENT = "rs", "response.reasoning_text"

    def takes(self, part: Part) -> bool:
        return bool(part.reasoning)

    def part(self) -> ReasoningText:
        return ReasoningText(type="reasoning_text", text=self.text)

    def item(self, status: ItemStatus) -> OutputReasoning:
        content = [] if status == "in_progress" else [self.part()]
        return OutputReasoning(id=self.id, type="reasoning", status=status, summary=[], content=content)


class _GrowingMessage(_GrowingText):
    PREFIX, EVENT, MORE = "msg", "response.output_text", {"logprobs": []}

    def takes(self, part: Part) -> bool:
        return part.call is None and not part.reasoning

    def part(self) -> OutputText:
        return OutputText(type="output_text", text=self.text, annotations=[])

    def item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self.part()]
        return OutputMessage(id=self.id, type="message", status=status, role="assistant", content=content)


class _GrowingCall(_Growing):
    PREFIX = "fc"

    def __init__(self, first: CallPart, index: int) -> None:
        super().__init__(index)
        assert first.call_id is not None
        assert first.name is not None
        self._position, self._call_id, self._name = first.position, first.call_id, first.name
        self._complete = True

    def takes(self, part: Part) -> bool:
        return part.call is not None and part.call.position == self._position

    def more(self, part: Part) -> Iterator[Said]:
        if part.call is None:
            return
        self._complete = part.call.complete
        if part.call.arguments:
            self._said.append(part.call.arguments)
            yield "response.function_call_arguments.delta", {**self.where, "delta": part.call.arguments}

    def closed(self, status: ItemStatus) -> Iterator[Said]:
        fields = {**self.where, "name": self._name, "arguments": self.text}
        yield "response.function_call_arguments.done", fields
        yield from super().closed(status)

    def item(self, status: ItemStatus) -> OutputCall:
        """Once it has ended it is complete or not by itself, whatever cut the response off after it."""
        if status != "in_progress":
            status = "completed" if self._complete else "incomplete"
        return OutputCall(
            id=self.id,
            type="function_call",
            status=status,
            call_id=self._call_id,
            name=self._name,
            arguments=self.text,
        )


def _growing(first: Part, index: int) -> _Growing:
    if first.call is not None:
        return _GrowingCall(first.call, index)
    return _GrowingReasoning(index) if first.reasoning else _GrowingMessage(index)
