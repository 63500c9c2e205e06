"""How the answers of one chat are to be read, and the grammar that their calls follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    combined,
)
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.respond.splitter import Splitter
from mlx_parallm.server.structured import compiled
from mlx_parallm.server.wire.chat import ChatBody
from mlx_parallm.server.wire.tools import NamedTool

MOST_CALLS = 32
"""Of one answer."""

_TAIL = 64
"""Prompt tokens in which a template's beginning of the reasoning is looked for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What may be in an answer beside text. `calls` None: no calls. `begun`: the prompt ends inside the reasoning.
    `either`: an answer is calls and nothing else, or has the format that was asked for."""

    reasoning: Reasoning | None
    begun: bool
    calls: ToolFormat | None
    tools: tuple[Tool, ...]
    most: int
    either: bool

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
        return Splitter(self.reasoning, self.begun, self.calls, self.tools, self.most, self.either)


def reading_of(body: ChatBody, prompt: Sequence[int], tokenizer: TextTokenizer) -> Reading:
    reasoning = tokenizer.reasoning
    begun = reasoning is not None and tokenizer.decode(prompt[-_TAIL:]).rstrip().endswith(reasoning.start)
    several = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)
    calls = tokenizer.tool_format if body.calls else None
    either = calls is not None and body.tool_choice == "auto" and body.grammar is not None
    return Reading(reasoning, begun, calls, callable_tools(body), MOST_CALLS if several else 1, either)


def callable_tools(body: ChatBody) -> tuple[Tool, ...]:
    """Those that an answer may call, as templates take them."""
    return tuple(tool.for_template() for tool in body.tools) if body.calls else ()


def grammar_of(body: ChatBody, reading: Reading, grammars: GrammarCompiler) -> Grammar | None:
    """What the answers must follow: calls where they must come, the format that is asked for where none may, and
    either of the two with `auto`; None where they are free. Takes a while: for a worker thread.

    Raises:
        InvalidRequestError: the format, or a tool's arguments, cannot be enforced; names the field or the tool.
    """
    if reading.calls is None:
        return compiled(body, grammars, reading.thinks, reading.spelled)
    free = body.tool_choice == "auto"
    if free and body.grammar is None and not any(tool.function.strict for tool in body.tools):
        return None
    wanted = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    places = [i for i, tool in enumerate(body.tools) if wanted in (None, tool.function.name)]
    try:
        return grammars.compile(_either(body, reading, places) if reading.either else _spec(reading, places, free))
    except InvalidRequestError as error:
        if error.param is None:
            _find_fault(body, reading, places, grammars)
        raise InvalidRequestError(str(error), param=error.param or "tools") from None


def _either(body: ChatBody, reading: Reading, places: Sequence[int]) -> GrammarSpec:
    assert body.grammar is not None
    return combined([_spec(reading, places, free=False), body.grammar[1]])


def _spec(reading: Reading, places: Sequence[int], free: bool) -> GrammarSpec:
    assert reading.calls is not None
    try:
        source = reading.calls.grammar([reading.tools[place] for place in places], reading.most, free)
    except UnwritableToolError as error:
        raise _at(places[error.index], error) from None
    return GrammarSpec(GrammarKind.GRAMMAR, source, reading.spelled, reading.thinks)


def _find_fault(body: ChatBody, reading: Reading, places: Sequence[int], grammars: GrammarCompiler) -> None:
    """Raises InvalidRequestError where the format alone, or a tool alone, cannot be enforced."""
    if reading.either:
        compiled(body, grammars, reading.thinks, reading.spelled)
    for place in places:
        try:
            grammars.compile(_spec(replace(reading, most=1), [place], free=False))
        except InvalidRequestError as error:
            raise _at(place, error) from None


def _at(place: int, error: Exception) -> InvalidRequestError:
    param = f"tools[{place}].function.parameters"
    return InvalidRequestError(f"{param}: {error}", param=param)
