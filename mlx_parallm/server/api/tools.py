"""Tool calling: the tools that a request offers, which of them an answer may or must call, and the grammar that
enforces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, ValidationError, ValidationInfo, model_validator

from mlx_parallm.core.grammar import Grammar, GrammarCompiler, GrammarKind, GrammarSpec, combined
from mlx_parallm.core.splitter import MAX_CALLS_PER_ANSWER, AnswerSyntax
from mlx_parallm.core.text import RepairKind, TextTokenizer, Tool, UnwritableToolError
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.bodies import COLLECTION_RULE, NO_LIMIT, GenerationBody, TokenLimit, checked_schema
from mlx_parallm.server.api.fields import WireInput, read_nested, refused
from mlx_parallm.server.request import compile_grammar

MAX_TOOLS = 128
MAX_TOOL_DESCRIPTION = 64 * 1024
"""Largest number of characters of a tool's description. Those of coding agents have several thousand."""

_ANY_TEXT = GrammarSpec(GrammarKind.TEXT, "")
_BARE = (
    'tool_choice: this model writes calls as plain JSON, so that "auto" cannot tell them from a structured output; '
    'send "required", "none" or a function'
)
_PROMPT_END = 64
"""Number of tokens at the end of a prompt that are decoded to see whether it ends with the start of reasoning."""

# ---- request fields --------------------------------------------------------------------------------


def _parameters(value: object) -> dict[str, Any]:
    schema = checked_schema(value)
    if not isinstance(schema, dict):
        raise refused("must be the JSON schema of an object")
    return schema


class Function(WireInput):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}\z")]
    """At most 128 letters, digits, _ and -, unique in the request."""
    description: Annotated[str, Field(max_length=MAX_TOOL_DESCRIPTION)] | None = None
    """What the function does, for the model."""
    parameters: Annotated[dict[str, Any], PlainValidator(_parameters, json_schema_input_type=dict[str, Any])] | None = (
        None
    )
    """The JSON schema of its arguments, which are an object; at most 128 KiB and 64 levels. If it is left out, the
    function takes no arguments."""
    strict: bool = False
    """If one function is strict, the arguments of all calls follow their schemas, even with `tool_choice` auto."""


class FunctionTool(WireInput):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: Function
    """The function."""

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class ChosenFunction(WireInput):
    """The name of a function."""

    name: str
    """The name of a function in `tools`."""


class NamedTool(WireInput):
    """The one function that the answer must call."""

    type: Literal["function"]
    function: ChosenFunction
    """The function."""


class SomeTools(WireInput):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    """`auto`: the answer may call them. `required`: it must call one or more."""
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]
    """The functions."""


class AllowedTools(WireInput):
    """The only functions that the answer may call. The model sees the others too."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools
    """The functions, and whether one of them must be called."""


def _tool_choice(value: object, info: ValidationInfo) -> str | NamedTool | AllowedTools:
    """Checks `tool_choice` by hand and not as a union, so that an error names the field."""
    if isinstance(value, NamedTool | AllowedTools) or (isinstance(value, str) and value in _CHOICES):
        return value
    try:
        if isinstance(value, dict) and value.get("type") == "allowed_tools":
            return read_nested(AllowedTools, value, info)
        return read_nested(NamedTool, value, info)
    except ValidationError:
        raise refused(f'must be "none", "auto", "required", {_NAMED} or {_ALLOWED}') from None


_CHOICES = ("none", "auto", "required")
_NAMED = '{"type": "function", "function": {"name": …}}'
_ALLOWED = f'{{"type": "allowed_tools", "allowed_tools": {{"mode": "auto", "tools": [{_NAMED}]}}}}'

ToolChoice = Annotated[
    str | NamedTool | AllowedTools,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | AllowedTools),
]


class ToolCallingBody(GenerationBody):
    """The request fields about tools."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: ToolChoice = "auto"
    """`none`: the model does not see the tools. `auto`: it may call them. `required`: it must call one or more. An
    object: it must call that function, or may call only those."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""
    thinking_token_budget: TokenLimit | None = None
    """The most tokens of reasoning, for a model that marks it: after so many, the mark that ends it comes. With -1, any
    number."""
    max_thinking_tokens: TokenLimit | None = None
    """Another name of `thinking_token_budget`."""

    @property
    def thinking_budget(self) -> tuple[str, int] | None:
        """The field that bounds the reasoning, and its number of tokens; None if there is none."""
        for name in ("thinking_token_budget", "max_thinking_tokens"):
            if (budget := getattr(self, name)) not in (None, NO_LIMIT):
                return name, budget
        return None

    @property
    def mode(self) -> str | NamedTool:
        """`tool_choice`, whichever tools it allows."""
        return self.tool_choice.allowed_tools.mode if isinstance(self.tool_choice, AllowedTools) else self.tool_choice

    @property
    def allowed(self) -> frozenset[str] | None:
        """The names of the only functions that an answer may call; None: it may call all."""
        match self.tool_choice:
            case NamedTool(function=named):
                return frozenset({named.name})
            case AllowedTools(allowed_tools=some):
                return frozenset(tool.function.name for tool in some.tools)
        return None

    @property
    def calls_tools(self) -> bool:
        """Whether an answer may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def enforces_calls(self) -> bool:
        """Whether a grammar restricts the calls: one must come, only some may, or arguments must follow their
        schemas."""
        strict = any(tool.function.strict for tool in self.tools)
        return self.calls_tools and (strict or self.tool_choice != "auto")

    @property
    def compiles(self) -> bool:
        return self.enforces_calls or super().compiles

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that an answer may call, as chat templates take them."""
        return tuple(tool.for_template() for tool in self.tools) if self.calls_tools else ()

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise refused("two functions have the same name", "tools")
        if self.allowed is not None:
            if not self.allowed.issubset(names):
                raise refused("is not the name of a function in tools", "tool_choice")
        elif self.tool_choice == "required" and not names:
            raise refused("needs tools", "tool_choice")
        if self.enforces_calls:
            self.check_grammar_options("tools" if self.tool_choice == "auto" else "tool_choice")
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.thinking_budget is None:
            return self
        name = self.thinking_budget[0]
        if self.collect_trajectory:
            raise refused(f"not supported with collect_trajectory: {COLLECTION_RULE}; leave it out", name)
        if self.allowed_token_ids is not None:
            raise refused(f"cannot be combined with {name}, which demands a token", "allowed_token_ids")
        return self


# ---- enforced calls --------------------------------------------------------------------------------


def answer_syntax(
    body: ToolCallingBody,
    prompt: Sequence[int],
    tokenizer: TextTokenizer,
    on_repair: Callable[[RepairKind], None] | None,
) -> AnswerSyntax:
    """What an answer may contain in addition to text.

    Args:
        prompt: the token ids of the rendered conversation.
        on_repair: see `AnswerSyntax`. Calls that a grammar enforces are not repaired.
    """
    reasoning = tokenizer.reasoning
    prompt_end = tokenizer.decode(prompt[-_PROMPT_END:]).rstrip() if reasoning else ""
    several = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)
    return AnswerSyntax(
        reasoning=reasoning,
        in_reasoning=reasoning is not None and prompt_end.endswith(reasoning.start),
        calls=tokenizer.tool_format if body.calls_tools else None,
        tools=body.callable_tools,
        max_calls=MAX_CALLS_PER_ANSWER if several else 1,
        calls_first=body.calls_tools and body.mode == "auto" and body.grammar is not None,
        enforced=body.calls_tools and body.compiles,
        on_repair=None if body.compiles else on_repair,
    )


def answer_grammar(body: ToolCallingBody, syntax: AnswerSyntax, grammars: GrammarCompiler) -> Grammar | None:
    """The grammar that the answers must follow, or None if any text is allowed. Call it in a worker thread, because it
    can take seconds.

    If no tool can be called, it is the grammar of the requested format. If a tool must be called, it allows only calls.
    With `tool_choice` auto, it allows either calls or the format. Without a format, it allows free text with calls. If
    only the reasoning is bounded, it allows any text after that.

    Raises:
        InvalidRequestError: the format, or the arguments of a tool, cannot be enforced, or the model does not mark its
            reasoning, which is to be bounded; the error names the field.
    """
    if body.thinking_budget is not None and syntax.reasoning is None:
        name, _ = body.thinking_budget
        raise InvalidRequestError(f"{name}: this model does not mark its reasoning; leave it out", param=name)
    if not body.compiles:
        return None if body.thinking_budget is None else grammars.compile(_placed(body, syntax, _ANY_TEXT))
    if syntax.calls is None:
        return _compile_format(body, syntax, grammars)
    allowed = body.allowed
    places = [place for place, tool in enumerate(body.tools) if allowed is None or tool.function.name in allowed]
    try:
        if syntax.calls_first and body.grammar is not None:
            if syntax.calls.starts[0].startswith("{"):
                raise InvalidRequestError(_BARE, param="tool_choice")
            form = replace(body.grammar[1], opening=syntax.opening)
            spec = combined([_calls_spec(syntax, places, free=False), form])
        else:
            spec = _calls_spec(syntax, places, free=body.mode == "auto")
        return grammars.compile(_placed(body, syntax, spec))
    except InvalidRequestError as error:
        if error.param is not None:
            raise
        _find_fault(body, syntax, places, grammars)
        raise InvalidRequestError(f"tools: {error}", param="tools") from None


def _compile_format(body: ToolCallingBody, syntax: AnswerSyntax, grammars: GrammarCompiler) -> Grammar:
    """Compiles the requested format alone."""
    assert body.grammar is not None
    param, spec = body.grammar
    return compile_grammar(param, _placed(body, syntax, replace(spec, opening=syntax.opening)), grammars)


def _placed(body: ToolCallingBody, syntax: AnswerSyntax, spec: GrammarSpec) -> GrammarSpec:
    """The grammar with what may come before its texts."""
    return replace(
        spec,
        visible_specials=syntax.visible_specials,
        reasoning_prefix=syntax.reasoning_prefix,
        reasoning_budget=body.thinking_budget and body.thinking_budget[1],
    )


def _calls_spec(syntax: AnswerSyntax, places: Sequence[int], free: bool) -> GrammarSpec:
    """The grammar of calls of the tools at `places`. With `free`, it also allows text around the calls, or no call."""
    assert syntax.calls is not None
    try:
        source = syntax.calls.grammar([syntax.tools[place] for place in places], syntax.max_calls, free)
    except UnwritableToolError as error:
        raise _tool_error(places[error.index], error) from None
    return GrammarSpec(GrammarKind.CALLS, source, syntax.visible_specials)


def _find_fault(body: ToolCallingBody, syntax: AnswerSyntax, places: Sequence[int], grammars: GrammarCompiler) -> None:
    """Raises InvalidRequestError if the format alone, or one tool alone, cannot be enforced."""
    if syntax.calls_first:
        _compile_format(body, syntax, grammars)
    for place in places:
        try:
            grammars.compile(_calls_spec(replace(syntax, max_calls=1), [place], free=False))
        except InvalidRequestError as error:
            raise _tool_error(place, error) from None


def _tool_error(place: int, error: Exception) -> InvalidRequestError:
    param = f"tools[{place}].function.parameters"
    return InvalidRequestError(f"{param}: {error}", param=param)
