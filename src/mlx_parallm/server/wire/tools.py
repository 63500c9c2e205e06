"""Tools that a model may call, which of them it shall call, and calls it has made."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, ValidationError, ValidationInfo

from mlx_parallm.server.wire.base import WireInput, WireOutput, read_nested, refused
from mlx_parallm.server.wire.grammar import MAX_DESCRIPTION, checked_schema
from mlx_parallm.server.wire.neutral import CALL, Neutral

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_CALL_NAME = 256
MAX_CALL_ID = 256
MAX_ARGUMENTS = 1024 * 1024


def _parameters(value: object) -> dict[str, Any]:
    schema = checked_schema(value)
    if not isinstance(schema, dict):
        raise refused("must be the JSON schema of an object")
    return schema


Parameters = Annotated[dict[str, Any], PlainValidator(_parameters, json_schema_input_type=dict[str, Any])]


class Function(WireInput):
    """A function, as the model is told of it."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}\z")]
    """At most 64 letters, digits, _ and -; no two the same."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    """What it is for."""
    parameters: Parameters | None = None
    """JSON schema of its arguments, an object's; left out: it takes none. At most 128 KiB and 64 levels."""
    strict: bool = False
    """One strict function has the arguments of all calls follow their schemas, with `tool_choice` auto too."""


class FunctionTool(WireInput):
    """A tool: functions are the only kind."""

    type: Literal["function"]
    """Always the same."""
    function: Function
    """What may be called."""

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class ChosenName(WireInput):
    """Which function."""

    name: str
    """One of `tools`."""


class NamedTool(WireInput):
    """The one function that must be called."""

    type: Literal["function"]
    """Always the same."""
    function: ChosenName
    """Which one."""


def _choice(value: object, info: ValidationInfo) -> str | NamedTool:
    """By hand rather than by union, so that a fault names the field."""
    if isinstance(value, NamedTool) or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    try:
        return read_nested(NamedTool.model_validate, value, info)
    except ValidationError:
        named = '{"type": "function", "function": {"name": …}}'
        raise refused(f'must be "none", "auto", "required" or {named}') from None


Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
ToolChoice = Annotated[
    str | NamedTool,
    PlainValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
]


class GivenFunction(WireInput):
    """What a call of an earlier turn called."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_CALL_NAME)]
    """The function."""
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS)] = ""
    """JSON text; the template is given the object where it is one."""


class GivenCall(WireInput):
    """A call of an earlier turn."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"index"})
    NEUTRAL: ClassVar[Neutral] = CALL

    id: Annotated[str, Field(max_length=MAX_CALL_ID)]
    """As it was answered."""
    type: Literal["function"] = "function"
    """Always the same."""
    function: GivenFunction
    """What was called."""

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": _object_or_text(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


def _object_or_text(text: str) -> object:
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


class CalledFunction(WireOutput):
    """What is called; in a stream, what a chunk adds."""

    name: str | None = None
    """The function; in a stream with the first chunk of a call."""
    arguments: str
    """JSON text; only the beginning of it, or nothing, in the last call of an answer that was cut off inside it."""


class Call(WireOutput):
    """A call."""

    id: str
    """For the message with its result."""
    type: Literal["function"]
    """Always the same."""
    function: CalledFunction
    """What is called."""


class CallDelta(WireOutput):
    """What a chunk adds to a call."""

    index: int
    """Which call of the answer."""
    id: str | None = None
    """With its first chunk."""
    type: Literal["function"] | None = None
    """With its first chunk."""
    function: CalledFunction
    """What is called."""
