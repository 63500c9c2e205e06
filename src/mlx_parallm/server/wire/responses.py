"""`POST /v1/responses`: OpenAI's Responses API, as far as one model that runs no tools itself can serve it.

A body is worded as a chat's body and checked by it once more, so that both routes have the same bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from mlx_parallm.server.wire.base import OpenBody, WireInput, WireQuery, read_nested, refused
from mlx_parallm.server.wire.common import INT32_MAX, NO_LIMIT, Seed, Temperature, TopP
from mlx_parallm.server.wire.messages import MAX_MESSAGES, TemplateOptions
from mlx_parallm.server.wire.neutral import REASONING, RESPONSES, RESPONSES_TOOL, Neutral
from mlx_parallm.server.wire.response_items import ChatMessageFields, Item, messages_of
from mlx_parallm.server.wire.tools import MAX_TOOLS

MAX_RESPONSE_ID = 128


OWN_NAMES: Sequence[tuple[str, str]] = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    (".function", ""),
)
"""Chat's names of fields, and the names that they have here."""


def own_name(param: str) -> str:
    """The field that a client sent, of the one that chat found at fault."""
    if param.startswith(("messages", "prompt")):
        return "input"
    for theirs, ours in OWN_NAMES:
        param = param.replace(theirs, ours)
    return param


class ResponseQuery(WireQuery):
    """OpenAI's."""

    include_obfuscation: bool = False
    """Taken and not read: an answer is streamed where it is made, and nowhere else."""


class InputItemsQuery(WireQuery):
    """OpenAI's."""

    after: Annotated[str, Field(max_length=MAX_RESPONSE_ID)] | None = None
    """The id of an item: the list begins after it."""
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Items at most."""
    order: Literal["asc", "desc"] = "desc"
    """`asc`: oldest first. `desc`: newest first."""
    include: Annotated[list[str], Field(alias="include[]", max_length=16)] = Field(default_factory=list)
    """Taken and not read: items are listed whole."""


class FlatTool(WireInput):
    """A function that the client runs, in the flat form of this API."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"output_schema"})
    NEUTRAL: ClassVar[Neutral] = RESPONSES_TOOL

    type: Literal["function"]
    """Always the same."""
    name: str
    """What the model calls it by."""
    description: str | None = None
    """What the model is told of it."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """As in chat."""

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedFunction(WireInput):
    """The function that is to be called."""

    type: Literal["function"]
    """Always the same."""
    name: str
    """One of `tools`."""

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


def _tool(value: object, info: ValidationInfo) -> FlatTool:
    if isinstance(value, dict) and value.get("type") != "function":
        raise refused("this server runs no tools itself; send functions, and run what the model calls", "type")
    return read_nested(FlatTool.model_validate, value, info)


def _tool_choice(value: object, info: ValidationInfo) -> str | NamedFunction:
    if isinstance(value, str):
        if value in ("none", "auto", "required"):
            return value
        raise refused('must be "none", "auto", "required" or a function')
    if isinstance(value, dict) and value.get("type") != "function":
        raise refused("this server runs no tools itself; only a function can be chosen", "type")
    return read_nested(NamedFunction.model_validate, value, info)


def _as_items(value: object) -> object:
    """A text is what the user says."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[Item],
    BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    Field(min_length=1, max_length=MAX_MESSAGES),
]
Tool = Annotated[FlatTool, PlainValidator(_tool, json_schema_input_type=FlatTool)]
ToolChoice = Annotated[
    str | NamedFunction,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedFunction),
]


class TextFormat(WireInput):
    """Chat's `response_format`, flat."""

    type: Literal["text", "json_object", "json_schema"]
    """`text`: as the model likes. `json_object`: one JSON object. `json_schema`: what the schema allows."""
    name: str | None = None
    """Of the schema."""
    description: str | None = None
    """Not read."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON schema of the answer."""
    strict: bool | None = None
    """Changes nothing: it is enforced either way."""

    def for_chat(self) -> dict[str, Any]:
        fields = self.sent()
        kind = fields.pop("type")
        return {"type": kind, "json_schema": fields} if fields or kind == "json_schema" else {"type": kind}

    def sent(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_unset=True)


class TextConfig(WireInput):
    """What an answer must be."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat = TextFormat(type="text")
    """What it must follow."""


class ReasoningConfig(WireInput):
    """How the model is to think. What it thought is answered as it is, and never summed up."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"context"})
    NEUTRAL: ClassVar[Neutral] = REASONING

    effort: str | None = None
    """Chat's `reasoning_effort`."""


class ResponsesBody(OpenBody):
    """A conversation so far, or what is new of one."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "service_tier",
            "stream_options",
            "max_tool_calls",
        }
    )
    NEUTRAL: ClassVar[Neutral] = {**RESPONSES, "max_output_tokens": (NO_LIMIT,)}
    CHAT_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {
            "model",
            "lora_adapter",
            "temperature",
            "top_p",
            "seed",
            "ignore_eos",
            "parallel_tool_calls",
            "metadata",
            "collect_trajectory",
            "scoring_function",
            "chat_template_kwargs",
        }
    )
    """Those with chat's name and meaning."""

    input: Items
    """What the user says, or items: messages, calls of functions and their outputs, reasoning."""
    instructions: str | None = None
    """A system message before all others; it is not kept for the next turn."""
    previous_response_id: Annotated[str, Field(max_length=MAX_RESPONSE_ID)] | None = None
    """A stored response that this one goes on from: its whole conversation comes before `input`."""
    model: str | None = None
    """As in chat: the served model, `base`, or an adapter."""
    lora_adapter: str | None = None
    """An adapter, as `model` names one; where both do, they must agree."""
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Tokens to draw at most, reasoning and calls among them; left out, as many as fit."""
    temperature: Temperature = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: TopP = 1.0
    """Least probability mass that the best tokens must have; 1 is off."""
    seed: Seed | None = None
    """Equal seeds draw equal tokens, whatever the neighbours."""
    ignore_eos: bool = False
    """Goes on past the end-of-sequence token."""
    stream: bool = False
    """Server-sent events instead of one body."""
    store: bool = True
    """Keeps the response in memory, for `previous_response_id` and `GET`, until newer ones need the room."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """`disabled`: what does not fit the context is refused. `auto`: the oldest messages are left out until the rest and
    `max_output_tokens` fit, or a quarter of the context where that is not given; instructions, system messages at the
    beginning and the last message stay."""
    text: TextConfig = TextConfig()
    """How the answer is to look."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: ToolChoice = "auto"
    """Whether it may, must or must not call one, or which."""
    parallel_tool_calls: bool = True
    """Whether it may call several at once."""
    reasoning: ReasoningConfig = ReasoningConfig()
    """How the model is to think."""
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] = Field(default_factory=list)
    """Only `reasoning.encrypted_content`, which changes nothing: the open text of a reasoning item, sent back, does
    what the encrypted one is for."""
    metadata: dict[str, Any] | None = None
    """At most 16 short strings, said again in the answer; with `collect_trajectory` any JSON, for the scorer."""
    collect_trajectory: bool = False
    """Keeps what is drawn, for training."""
    scoring_function: str | None = None
    """Who rewards what is collected; left out, feedback does."""
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    """Switches of the chat template."""

    def messages(self) -> list[ChatMessageFields]:
        """What is new of the conversation."""
        return messages_of(self.input)

    def for_chat(self, earlier: Sequence[ChatMessageFields]) -> dict[str, Any]:
        """The body of the same request to chat. `instructions` are this request's alone: none come with `earlier`."""
        rules = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return {
            **self.model_dump(include=set(self.CHAT_FIELDS), exclude_unset=True),
            "messages": [*rules, *earlier, *self.messages()],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
            "tools": [tool.for_chat() for tool in self.tools] or None,
            "tool_choice": self._choice_for_chat(),
        }

    def _choice_for_chat(self) -> object:
        if "tool_choice" not in self.model_fields_set:
            return None
        return self.tool_choice.for_chat() if isinstance(self.tool_choice, NamedFunction) else self.tool_choice
