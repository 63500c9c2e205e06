"""The tools of `/v1/responses`, and how the model sees them: each is a function.

    function   as it is
    namespace  its functions, each called `<namespace>__<name>`
    custom     a function of one string, `input`

Tools of other types are run by OpenAI's servers. They are left out, and the header x-ignored-fields names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, ValidationInfo

from mlx_parallm.server.api.chat.tools import MAX_TOOLS
from mlx_parallm.server.api.fields import Neutral, Validate, WireInput, ignored_part, read_nested, refused

INPUT = "input"
"""The one argument of a custom tool."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model sees it.

    Attributes:
        path: where it is in the client's list, such as `tools[2].tools[0]`.
        function: the fields of chat's function.
        name, namespace: its name for the client, and the namespace that it is in.
        custom: whether the client gets the string `input` and not the arguments.
    """

    path: str
    function: Mapping[str, Any]
    name: str
    namespace: str | None = None
    custom: bool = False


def shown_name(name: str, namespace: str | None) -> str:
    """The name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


class _ClientTool(WireInput):
    """A tool that the client runs."""

    def sent(self) -> dict[str, Any]:
        """The fields that the client set."""
        return self.model_dump(exclude_none=True)


class FlatTool(_ClientTool):
    """A function that the client runs, in the flat form of this API."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"output_schema"})
    NEUTRAL: ClassVar[Neutral] = {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,)}

    type: Literal["function"]
    name: str
    """The function's name."""
    description: str | None = None
    """What the function does, for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None
    """If one function is strict, the arguments of all calls follow their schemas."""

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        fields = self.model_dump(exclude={"type"}, exclude_none=True)
        yield OfferedTool(path, {**fields, "name": shown_name(self.name, namespace)}, self.name, namespace)


class CustomTool(_ClientTool):
    """A tool that takes a text and no JSON. The model sees a function with one string."""

    NEUTRAL: ClassVar[Neutral] = {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,)}

    type: Literal["custom"]
    name: str
    """The tool's name."""
    description: str | None = None
    """What the tool does, for the model."""
    format: dict[str, Any] | None = None
    """The form of the text. A grammar is shown to the model but not enforced."""

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        text: dict[str, Any] = {"type": "string"}
        if definition := (self.format or {}).get("definition"):
            text["description"] = f"A text of this grammar:\n{definition}"
        function = {
            "name": shown_name(self.name, namespace),
            "description": self.description or "",
            "parameters": {"type": "object", "properties": {INPUT: text}, "required": [INPUT]},
        }
        yield OfferedTool(path, function, self.name, namespace, custom=True)


def _read(model: type[WireInput], value: object, info: ValidationInfo) -> WireInput:
    validate: Validate[WireInput] = model.model_validate
    return read_nested(validate, value, info)


def _type_of(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def _member(value: object, info: ValidationInfo) -> WireInput:
    if (kind := _type_of(value)) not in MEMBERS:
        raise refused("a namespace has functions and custom tools", "type")
    return _read(MEMBERS[kind], value, info)


MEMBERS: Mapping[str | None, type[FlatTool | CustomTool]] = {"function": FlatTool, "custom": CustomTool}
Member = Annotated[FlatTool | CustomTool, PlainValidator(_member, json_schema_input_type=FlatTool | CustomTool)]


class NamespaceTool(_ClientTool):
    """Tools that belong together, such as those of one MCP server."""

    type: Literal["namespace"]
    name: str
    """The first part of the tools' names."""
    description: str | None = None
    """Accepted and ignored: the model sees the description of each tool."""
    tools: Annotated[list[Member], Field(max_length=MAX_TOOLS)]
    """Its tools: functions or custom tools."""

    def sent(self) -> dict[str, Any]:
        return self.model_dump(exclude={"tools"}, exclude_none=True) | {"tools": [tool.sent() for tool in self.tools]}

    def offered(self, path: str) -> Iterator[OfferedTool]:
        for place, tool in enumerate(self.tools):
            yield from tool.offered(f"{path}.tools[{place}]", self.name)


AnyTool = FlatTool | CustomTool | NamespaceTool
KINDS: Mapping[str | None, type[AnyTool]] = {**MEMBERS, "namespace": NamespaceTool}


def _tool(value: object, info: ValidationInfo) -> WireInput | None:
    kind = _type_of(value)
    if kind in KINDS:
        return _read(KINDS[kind], value, info)
    if kind is None or not ignored_part(kind, info):
        raise refused("this server runs no tools itself; send functions, and run what the model calls", "type")
    return None


Tools = Annotated[
    list[Annotated[AnyTool | None, PlainValidator(_tool, json_schema_input_type=AnyTool)]],
    Field(max_length=MAX_TOOLS),
]
"""None stands for a tool that was left out."""


def offered_tools(tools: Iterable[AnyTool | None]) -> list[OfferedTool]:
    """What the model sees of the tools."""
    places = [(f"tools[{place}]", tool) for place, tool in enumerate(tools) if tool is not None]
    return [offered for path, tool in places for offered in tool.offered(path)]


def names_of_tools(tools: Sequence[OfferedTool]) -> dict[str, str]:
    """What the client calls chat's fields of each tool; see `Dialect.names`."""
    return {rf"tools\[{place}\]\.function": tool.path for place, tool in enumerate(tools)}


class NamedChoice(WireInput):
    """The one tool that the answer must call."""

    type: Literal["function", "custom"]
    """The tool's type."""
    name: str
    """The name of one of `tools`."""
    namespace: str | None = None
    """The namespace that the tool is in."""

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": shown_name(self.name, self.namespace)}}


class AllowedChoice(WireInput):
    """The only tools that the answer may call. The model sees the others too."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """`auto`: the answer may call them. `required`: it must call one or more."""
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]
    """The tools."""

    def for_chat(self) -> dict[str, Any]:
        some = {"mode": self.mode, "tools": [tool.for_chat() for tool in self.tools]}
        return {"type": self.type, "allowed_tools": some}


def _tool_choice(value: object, info: ValidationInfo) -> str | NamedChoice | AllowedChoice:
    if isinstance(value, str):
        if value in ("none", "auto", "required"):
            return value
        raise refused('must be "none", "auto", "required" or a function')
    kind = value.get("type") if isinstance(value, dict) else "function"
    if kind == "allowed_tools":
        return read_nested(AllowedChoice.model_validate, value, info)
    if kind not in ("function", "custom"):
        raise refused("this server runs no tools itself; only functions can be chosen", "type")
    return read_nested(NamedChoice.model_validate, value, info)


ToolChoice = Annotated[
    str | NamedChoice | AllowedChoice,
    PlainValidator(
        _tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedChoice | AllowedChoice
    ),
]
