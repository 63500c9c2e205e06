"""What a model writes that is no plain text: its reasoning, and its calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tool = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON text of an object; where the call is not `complete`, the beginning of one, or nothing.

    `call_id` None: the family gives its calls no names.
    """

    name: str
    arguments: str
    call_id: str | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around what a model thinks before it answers.

    `around`: marks that some families set around the answer itself; they are no text either.
    `spelled`: special tokens that these marks are made of.
    """

    start: str
    end: str
    around: tuple[str, ...] = ()
    spelled: frozenset[int] = frozenset()


class ToolFormat(Protocol):
    """How a family of models writes calls of tools. Any thread."""

    @property
    def start(self) -> str:
        """The mark before calls."""
        ...

    @property
    def end(self) -> str:
        """The mark after them; empty where they go on to the end of the text."""
        ...

    @property
    def in_template(self) -> bool:
        """Whether the chat template tells the model of tools, calls and results. Else messages have to, and a call is
        a JSON object of `name` and `arguments`."""
        ...

    @property
    def spelled(self) -> frozenset[int]:
        """Special tokens that calls are written with."""
        ...

    def inside_value(self, text: str) -> bool:
        """Whether what follows `text`, which came after the start mark, is inside a value: no end mark, then."""
        ...

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """The calls between two marks, at least one. Raises ValueError: there is none, or it is malformed."""
        ...

    def unfinished(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """The calls of a text that was cut off after a start mark; only the last one may be incomplete, and none is
        there while its name is not. Raises ValueError: no call begins like this."""
        ...

    def grammar(self, tools: Sequence[Tool], most: int, free: bool) -> str:
        """Lark source of a text that is 1 to `most` calls; `free`: of any text, in which calls are well-formed.

        Raises:
            UnwritableToolError: the family cannot write the arguments of a tool so that they are sure to be read back.
        """
        ...


class UnwritableToolError(ValueError):
    """`index` is the tool's place in the list."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
