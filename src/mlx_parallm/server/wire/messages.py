"""A conversation as chat takes it: turns, and the switches of the template that renders them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationInfo, model_validator

from mlx_parallm.server.wire.base import WireInput, read_nested, refused
from mlx_parallm.server.wire.neutral import MESSAGE, Neutral
from mlx_parallm.server.wire.tools import MAX_CALL_ID, MAX_CALLS, GivenCall

MAX_MESSAGES = 4096


class TextPart(WireInput):
    type: Literal["text"]
    """Always the same."""
    text: str
    """What it says."""


_PARTS = TypeAdapter(list[TextPart])


def _joined_parts(value: object, info: ValidationInfo) -> object:
    """Text parts become one text, a line each."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refused('each part must be {"type": "text", "text": …}: this model reads text alone')
    return "\n".join(part.text for part in read_nested(_PARTS.validate_python, value, info))


class Message(WireInput):
    """One turn."""

    NEUTRAL: ClassVar[Neutral] = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who says it; `developer` is `system`."""
    content: Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=str | list[TextPart])] | None = None
    """Text, or parts of text; an assistant's turn may be without."""
    name: str | None = None
    """Of who says it; for templates that know names."""
    tool_calls: Annotated[list[GivenCall], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    """The calls that an assistant's turn made."""
    tool_call_id: Annotated[str, Field(max_length=MAX_CALL_ID)] | None = None
    """The call whose result a tool's turn is."""
    reasoning_content: str | None = None
    """What an assistant thought."""
    reasoning: str | None = None
    """vLLM's name of `reasoning_content`."""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise refused("required for this role", "content")
        if self.tool_calls and self.role != "assistant":
            raise refused("only an assistant's turn has them", "tool_calls")
        if self.tool_call_id is None and self.role == "tool":
            raise refused("required for this role: the id of the call that this is the result of", "tool_call_id")
        return self

    def for_template(self) -> dict[str, Any]:
        """What chat templates read. They know no `developer`: it is the newer name of `system`."""
        thought = self.reasoning_content or self.reasoning
        calls = [call.for_template() for call in self.tool_calls]
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
            **({"name": self.name} if self.name is not None else {}),
            **({"tool_call_id": self.tool_call_id} if self.tool_call_id is not None else {}),
            **({"reasoning_content": thought} if thought is not None else {}),
            **({"tool_calls": calls} if calls else {}),
        }


class TemplateOptions(WireInput):
    """The template variables a client may set: switches that known templates read, and nothing else."""

    enable_thinking: bool | None = None
    """Whether the model shall think first."""
    thinking: bool | None = None
    """The same, in other families."""
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    """How long it shall think, in the words of its family."""

    def variables(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
