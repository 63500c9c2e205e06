"""How the answers of one chat are to be read, and the grammar that their calls follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.core import (
    Grammar,
    GrammarCompiler,
    GrammarKind,
    GrammarSpec,
    Reasoning,
    TextTokenizer,
    Thinks,
    Tool,
    ToolFormat,
    UnwritableToolError,
)
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.respond.splitter import Splitter
from mlx_parallm.server.wire.chat import ChatBody
from mlx_parallm.server.wire.tools import NamedTool

MOST_CALLS = 32
"""Of one answer."""

_TAIL = 64
"""Prompt tokens in which a template's beginning of the reasoning is looked for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What may be in an answer beside text. `calls` None: no calls. `begun`: the prompt ends inside the reasoning."""

    reasoning: Reasoning | None
    begun: bool
    calls: ToolFormat | None
    tools: tuple[Tool, ...]
    most: int

    @property
    def spelled(self) -> frozenset[int]:
        """Special tokens that are text of the answer: its marks are made of them."""
        return (self.reasoning.spelled if self.reasoning else frozenset()) | (
            self.calls.spelled if self.calls else frozenset()
        )

    @property
    def thinks(self) -> Thinks:
        if self.reasoning is None:
            return Thinks.NO
        return Thinks.ALREADY if self.begun else Thinks.MAY

    def splitter(self) -> Splitter:
        """One for each choice."""
        return Splitter(self.reasoning, self.begun, self.calls, self.tools, self.most)


def reading_of(body: ChatBody, prompt: Sequence[int], tokenizer: TextTokenizer) -> Reading:
    reasoning = tokenizer.reasoning
    begun = reasoning is not None and tokenizer.decode(prompt[-_TAIL:]).rstrip().endswith(reasoning.start)
    several = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)
    calls = tokenizer.tool_format if body.calls else None
    return Reading(reasoning, begun, calls, callable_tools(body), MOST_CALLS if several else 1)


def callable_tools(body: ChatBody) -> tuple[Tool, ...]:
    """Those that an answer may call, as templates take them."""
    return tuple(tool.for_template() for tool in body.tools) if body.calls else ()


def enforced(body: ChatBody, reading: Reading, grammars: GrammarCompiler) -> Grammar | None:
    """What makes the answers call; None where they are free to. Takes a while: for a worker thread.

    Raises:
        InvalidRequestError: a tool's arguments cannot be enforced; names the tool.
    """
    free = body.tool_choice == "auto"
    if reading.calls is None or (free and not any(tool.function.strict for tool in body.tools)):
        return None
    wanted = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    places = [i for i, tool in enumerate(body.tools) if wanted in (None, tool.function.name)]
    try:
        return grammars.compile(_spec(reading, places, reading.most, free))
    except InvalidRequestError as error:
        for place in places if error.param is None else ():
            _check(reading, place, grammars)
        raise InvalidRequestError(str(error), param=error.param or "tools") from None


def _spec(reading: Reading, places: Sequence[int], most: int, free: bool) -> GrammarSpec:
    assert reading.calls is not None
    try:
        source = reading.calls.grammar([reading.tools[place] for place in places], most, free)
    except UnwritableToolError as error:
        raise _at(places[error.index], error) from None
    return GrammarSpec(GrammarKind.GRAMMAR, source, reading.spelled, reading.thinks)


def _check(reading: Reading, place: int, grammars: GrammarCompiler) -> None:
    """Raises InvalidRequestError: it is this tool that cannot be enforced."""
    try:
        grammars.compile(_spec(reading, [place], 1, free=False))
    except InvalidRequestError as error:
        raise _at(place, error) from None


def _at(place: int, error: Exception) -> InvalidRequestError:
    param = f"tools[{place}].function.parameters"
    return InvalidRequestError(f"{param}: {error}", param=param)
