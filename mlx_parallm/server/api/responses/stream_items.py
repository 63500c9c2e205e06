"""The output items of a response while they are generated, and the events about them.

    reasoning  added, content_part.added, reasoning_text.delta …, reasoning_text.done, content_part.done, done
    message    added, content_part.added, output_text.delta …, output_text.done, content_part.done, done
    call       added, function_call_arguments.delta …, function_call_arguments.done, done

One item is open at a time. A part of another kind ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from mlx_parallm.server.api.chat.splitter import AnswerPart, CallPart
from mlx_parallm.server.api.responses.objects import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    new_id,
)

ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event, and its fields without the sequence number."""


class OutputItems:
    """The items of one response: those that are `done`, and the open one."""

    def __init__(self) -> None:
        self.done: list[OutputItem] = []
        self._open: _OpenItem | None = None

    def add(self, part: AnswerPart) -> Iterator[ItemEvent]:
        """Adds a part to the open item, or ends that item and opens another."""
        if self._open is None or not self._open.takes(part):
            yield from self.close("completed")
            self._open = _open_item(part, len(self.done))
            yield from self._open.added()
        yield from self._open.extend(part)

    def close(self, status: ItemStatus) -> Iterator[ItemEvent]:
        """Ends the open item, if there is one."""
        if self._open is not None:
            yield from self._open.closed(status)
            self.done.append(self._open.item(status))
            self._open = None


class _OpenItem(ABC):
    PREFIX: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.id = new_id(self.PREFIX)
        self.position: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def takes(self, part: AnswerPart) -> bool:
        """Whether the part belongs to this item."""

    @abstractmethod
    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        """Adds a part that belongs to this item."""

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it is now. One that is in progress has no content yet."""

    def added(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", self._item_fields("in_progress")

    def closed(self, status: ItemStatus) -> Iterator[ItemEvent]:
        yield "response.output_item.done", self._item_fields(status)

    def _item_fields(self, status: ItemStatus) -> dict[str, Any]:
        return {"output_index": self.position["output_index"], "item": self.item(status)}


class _OpenText(_OpenItem):
    """An item that consists of one text."""

    EVENT: ClassVar[str]
    EXTRA: ClassVar[dict[str, Any]] = {}
    """Fields that the text's events have besides."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.position |= {"content_index": 0}

    @abstractmethod
    def content(self) -> OutputText | ReasoningText: ...

    def added(self) -> Iterator[ItemEvent]:
        yield from super().added()
        yield "response.content_part.added", {**self.position, "part": self.content()}

    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        if text := part.reasoning or part.text:
            self._texts.append(text)
            yield f"{self.EVENT}.delta", {**self.position, "delta": text, **self.EXTRA}

    def closed(self, status: ItemStatus) -> Iterator[ItemEvent]:
        yield f"{self.EVENT}.done", {**self.position, "text": self.text, **self.EXTRA}
        yield "response.content_part.done", {**self.position, "part": self.content()}
        yield from super().closed(status)


class _OpenReasoning(_OpenText):
    PREFIX, EVENT = "rs", "response.reasoning_text"

    def takes(self, part: AnswerPart) -> bool:
        return bool(part.reasoning)

    def content(self) -> ReasoningText:
        return ReasoningText(type="reasoning_text", text=self.text)

    def item(self, status: ItemStatus) -> OutputReasoning:
        content = [] if status == "in_progress" else [self.content()]
        return OutputReasoning(id=self.id, type="reasoning", status=status, summary=[], content=content)


class _OpenMessage(_OpenText):
    PREFIX, EVENT, EXTRA = "msg", "response.output_text", {"logprobs": []}

    def takes(self, part: AnswerPart) -> bool:
        return part.call is None and not part.reasoning

    def content(self) -> OutputText:
        return OutputText(type="output_text", text=self.text, annotations=[])

    def item(self, status: ItemStatus) -> OutputMessage:
        content = [] if status == "in_progress" else [self.content()]
        return OutputMessage(id=self.id, type="message", status=status, role="assistant", content=content)


class _OpenCall(_OpenItem):
    PREFIX = "fc"

    def __init__(self, first: CallPart, index: int) -> None:
        super().__init__(index)
        assert first.call_id is not None
        assert first.name is not None
        self._place, self._call_id, self._name = first.position, first.call_id, first.name
        self._complete = True

    def takes(self, part: AnswerPart) -> bool:
        return part.call is not None and part.call.position == self._place

    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        if part.call is None:
            return
        self._complete = part.call.complete
        if part.call.arguments:
            self._texts.append(part.call.arguments)
            yield "response.function_call_arguments.delta", {**self.position, "delta": part.call.arguments}

    def closed(self, status: ItemStatus) -> Iterator[ItemEvent]:
        fields = {**self.position, "name": self._name, "arguments": self.text}
        yield "response.function_call_arguments.done", fields
        yield from super().closed(status)

    def item(self, status: ItemStatus) -> OutputCall:
        """A closed call is complete or not by itself, even if the response was cut off after it."""
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


def _open_item(first: AnswerPart, index: int) -> _OpenItem:
    if first.call is not None:
        return _OpenCall(first.call, index)
    return _OpenReasoning(index) if first.reasoning else _OpenMessage(index)
