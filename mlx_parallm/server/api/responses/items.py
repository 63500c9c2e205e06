"""The output items of a response, and the events that they have while they are generated:

    reasoning    added, content_part.added, reasoning_text.delta …, reasoning_text.done, content_part.done, done
    message      added, content_part.added, output_text.delta …, output_text.done, content_part.done, done
    call         added, function_call_arguments.delta …, function_call_arguments.done, done
    custom call  added, custom_tool_call_input.delta …, custom_tool_call_input.done, done

One item is open at a time. A part of the answer that does not belong to it ends it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from mlx_parallm.core.splitter import AnswerPart, CallPart
from mlx_parallm.server.api.responses.objects import (
    ItemStatus,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    new_id,
)
from mlx_parallm.server.api.responses.tools import INPUT, OfferedTool

ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event, and its fields without the sequence number."""


class OutputItems:
    """The items of one response: those that are `done`, and the open one.

    Args:
        tools: the tools that can be called, by the names that the model sees.
    """

    def __init__(self, tools: Mapping[str, OfferedTool]) -> None:
        self.done: list[OutputItem] = []
        self._tools = tools
        self._open: _OpenItem | None = None

    def add(self, part: AnswerPart) -> Iterator[ItemEvent]:
        """Adds a part to the open item, or ends that item and opens another."""
        if self._open is None or not self._open.takes(part):
            yield from self.close("completed")
            self._open = self._opened(part)
            yield from self._open.added()
        yield from self._open.extend(part)

    def close(self, status: ItemStatus) -> Iterator[ItemEvent]:
        """Ends the open item, if there is one."""
        if self._open is not None:
            yield from self._open.closed(status)
            self.done.append(self._open.item(status))
            self._open = None

    def _opened(self, part: AnswerPart) -> _OpenItem:
        index = len(self.done)
        if part.call is None:
            return _OpenReasoning(index) if part.reasoning else _OpenMessage(index)
        tool = self._tools[part.call.name or ""]
        return (_OpenCustomCall if tool.custom else _OpenCall)(index, part.call, tool)


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
    """Further fields of the events about the text."""

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

    def __init__(self, index: int, first: CallPart, tool: OfferedTool) -> None:
        super().__init__(index)
        self._first = first
        self._tool = tool
        self._complete = first.complete

    def takes(self, part: AnswerPart) -> bool:
        return part.call is not None and part.call.position == self._first.position

    def extend(self, part: AnswerPart) -> Iterator[ItemEvent]:
        if part.call is None:
            return
        self._complete = part.call.complete
        if delta := self._text_of(part.call):
            self._texts.append(delta)
            yield f"{self._event}.delta", {**self.position, "delta": delta}

    def closed(self, status: ItemStatus) -> Iterator[ItemEvent]:
        yield f"{self._event}.done", {**self.position, **self._done_fields()}
        yield from super().closed(status)

    def item(self, status: ItemStatus) -> OutputItem:
        """A closed call has a status of its own: it may be complete even if the response was cut off after it."""
        if status != "in_progress":
            status = "completed" if self._complete else "incomplete"
        namespace = {} if self._tool.namespace is None else {"namespace": self._tool.namespace}
        called = {"call_id": self._first.call_id, "name": self._tool.name, **namespace}
        return self._output({"id": self.id, "status": status, **called})

    _event: ClassVar[str] = "response.function_call_arguments"

    def _text_of(self, call: CallPart) -> str:
        """What the part adds to the text that the client gets."""
        return call.arguments

    def _done_fields(self) -> dict[str, Any]:
        return {"name": self._tool.name, "arguments": self.text}

    def _output(self, fields: dict[str, Any]) -> OutputItem:
        return OutputCall(type="function_call", arguments=self.text, **fields)


class _OpenCustomCall(_OpenCall):
    PREFIX = "ctc"
    _event = "response.custom_tool_call_input"

    def __init__(self, index: int, first: CallPart, tool: OfferedTool) -> None:
        super().__init__(index, first, tool)
        self._input = InputText()

    def _text_of(self, call: CallPart) -> str:
        return self._input.add(call.arguments, call.complete)

    def _done_fields(self) -> dict[str, Any]:
        return {"input": self.text}

    def _output(self, fields: dict[str, Any]) -> OutputItem:
        return OutputCustomCall(type="custom_tool_call", input=self.text, **fields)


class InputText:
    """The text for a custom tool, read from the JSON text of the function's arguments while that grows."""

    _BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
    _HIGH, _HEX = r"[dD][89abAB][0-9a-fA-F]{2}", r"[0-9a-fA-F]{4}"
    _CHARACTERS = re.compile(rf'(?:[^"\\]|\\[^u]|\\u{_HIGH}\\u{_HEX}|\\u(?!{_HIGH}){_HEX})*')
    """Whole characters inside a string."""

    def __init__(self) -> None:
        self._arguments = ""
        self._read = 0  # length of the arguments that are read
        self._sent = 0  # length of the text that was returned

    def add(self, arguments: str, complete: bool) -> str:
        """What the next part of the arguments adds to the text. If `complete`, it is the last part."""
        self._arguments += arguments
        added = self._whole()[self._sent :] if complete else self._next_characters()
        self._sent += len(added)
        return added

    def _next_characters(self) -> str:
        if self._read == 0:
            beginning = self._BEGINNING.match(self._arguments)
            self._read = beginning.end() if beginning else 0
        if self._read == 0:
            return ""
        found = self._CHARACTERS.match(self._arguments, self._read)
        assert found is not None
        self._read = found.end()
        return str(json.loads(f'"{found.group()}"'))

    def _whole(self) -> str:
        """The text for the tool; if the model gave other arguments, their JSON text."""
        text = json.loads(self._arguments).get(INPUT)
        return text if isinstance(text, str) else self._arguments
