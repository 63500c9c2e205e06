"""A conversation with one adapter, or the same one with two of them side by side."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from mlx_parallm.cli.remote.client import Client
from mlx_parallm.cli.remote.streaming import STREAM_TIMEOUT, stream_chat

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Message = dict[str, str]

_FRAMES_PER_SECOND = 8


@dataclass(slots=True, eq=False)
class Side:
    """The conversation with one model or adapter.

    Attributes:
        model: the name that requests have; None: the served model.
        messages: pairs of a message of the user and the answer to it.
        answer, reasoning: text of the last answer, as far as it has come.
        trajectory_id: of the last answer, if it was collected.
    """

    model: str | None
    messages: list[Message] = field(default_factory=list)
    answer: str = ""
    reasoning: str = ""
    trajectory_id: str | None = None

    @property
    def name(self) -> str:
        return self.model or "the served model"

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Takes a chunk of the answer. Returns the text that it adds, reasoning or not."""
        if ids := chunk.get("trajectory_ids"):
            self.trajectory_id = ids[0]
        added = ""
        for choice in chunk.get("choices") or ():
            delta = choice["delta"]
            reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
            self.reasoning += reasoning
            self.answer += content
            added += reasoning + content
        return added


class AdapterChat:
    """Asks one server the same questions with one adapter or with two.

    Attributes:
        options: fields of every request, such as `temperature`.
        system: the system message; empty: none.
    """

    def __init__(self, client: Client, models: Sequence[str | None], system: str, options: Mapping[str, Any]) -> None:
        self.client = client
        self.system = system
        self.options = dict(options)
        self.sides = [Side(model) for model in models]

    def choose(self, models: Sequence[str | None]) -> None:
        """Goes on with other adapters. Each of them gets what was said so far by the first one."""
        messages = self.sides[0].messages
        self.sides = [Side(model, list(messages)) for model in models]

    def clear(self) -> None:
        """Forgets what was said."""
        self.sides = [Side(side.model) for side in self.sides]

    def take_back(self) -> str | None:
        """Removes the last question and its answers. Returns the question; None if there is none."""
        asked = [side.messages for side in self.sides if side.messages]
        if not asked:
            return None
        question = asked[0][-2]["content"]
        for messages in asked:
            if messages[-2]["content"] == question:
                del messages[-2:]
        return question

    def ask(self, question: str, console: Console) -> None:
        """Prints the answers while they come. Ctrl-C ends them; what has come is kept.

        Raises:
            ConfigError, ParaLLMError: an answer failed; the question is taken back.
            KeyboardInterrupt: the answers were interrupted.
        """
        for side in self.sides:
            side.messages.append({"role": "user", "content": question})
            side.answer, side.reasoning, side.trajectory_id = "", "", None
        try:
            asyncio.run(self._answers(console))
        finally:
            for side in self.sides:
                self._keep(side)

    def _keep(self, side: Side) -> None:
        """Adds the answer to what was said, or removes the question if there is none."""
        if side.answer:
            side.messages.append({"role": "assistant", "content": side.answer})
        else:
            side.messages.pop()

    async def _answers(self, console: Console) -> None:
        async with httpx.AsyncClient(timeout=STREAM_TIMEOUT) as http:
            if len(self.sides) == 1:
                await self._stream(http, self.sides[0], lambda text: console.out(text, end="", highlight=False))
                console.print()
            elif console.is_terminal:
                await self._side_by_side(http, console)
            else:
                await asyncio.gather(*(self._stream(http, side) for side in self.sides))
                for side in self.sides:
                    console.out(f"{side.name}:\n{side.reasoning}{side.answer}\n", highlight=False)

    async def _side_by_side(self, http: httpx.AsyncClient, console: Console) -> None:
        from rich.live import Live

        with Live(get_renderable=self._columns, console=console, refresh_per_second=_FRAMES_PER_SECOND):
            await asyncio.gather(*(self._stream(http, side) for side in self.sides))

    def _columns(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        columns = Table(expand=True)
        for side in self.sides:
            columns.add_column(side.name, ratio=1)
        columns.add_row(
            *(Text(side.reasoning, style="dim").append(side.answer, style="not dim") for side in self.sides)
        )
        return columns

    async def _stream(self, http: httpx.AsyncClient, side: Side, write: Callable[[str], object] | None = None) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        model = {"model": side.model} if side.model else {}
        body = {**model, **self.options, "messages": [*system, *side.messages]}
        async for chunk in stream_chat(self.client, http, body):
            with self.client.reading():
                text = side.add(chunk)
            if write is not None and text:
                write(text)
                sys.stdout.flush()
