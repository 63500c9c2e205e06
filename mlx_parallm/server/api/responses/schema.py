"""The body of `POST /v1/responses`: OpenAI's Responses API for a server that does not run tools itself.

A body is translated into a chat body, which is validated too, so both routes have the same limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from mlx_parallm.server.api.chat.messages import MAX_MESSAGES, TemplateOptions
from mlx_parallm.server.api.chat.tools import MAX_TOOLS
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, WireInput, read_nested, refused
from mlx_parallm.server.api.generation_fields import UNSUPPORTED_OPTIONS, SharedBody
from mlx_parallm.server.api.responses.conversation import ChatMessageFields, Item, messages_of
from mlx_parallm.server.api.sampling_fields import NO_LIMIT

MAX_RESPONSE_ID = 128


class FlatTool(WireInput):
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

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


def _flat_tool(value: object, info: ValidationInfo) -> FlatTool:
    if isinstance(value, dict) and value.get("type") != "function":
        raise refused("this server runs no tools itself; send functions, and run what the model calls", "type")
    return read_nested(FlatTool.model_validate, value, info)


class NamedFunction(WireInput):
    """The one function that the answer must call."""

    type: Literal["function"]
    name: str
    """The name of one of `tools`."""

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


def _flat_tool_choice(value: object, info: ValidationInfo) -> str | NamedFunction:
    if isinstance(value, str):
        if value in ("none", "auto", "required"):
            return value
        raise refused('must be "none", "auto", "required" or a function')
    if isinstance(value, dict) and value.get("type") != "function":
        raise refused("this server runs no tools itself; only a function can be chosen", "type")
    return read_nested(NamedFunction.model_validate, value, info)


def _as_items(value: object) -> object:
    """A text becomes a message of the user."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    list[Item],
    BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    Field(min_length=1, max_length=MAX_MESSAGES),
]
FlatTools = Annotated[
    list[Annotated[FlatTool, PlainValidator(_flat_tool, json_schema_input_type=FlatTool)]],
    Field(max_length=MAX_TOOLS),
]
FlatToolChoice = Annotated[
    str | NamedFunction,
    PlainValidator(_flat_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedFunction),
]


class TextFormat(WireInput):
    """Chat's `response_format`, in the flat form of this API."""

    type: Literal["text", "json_object", "json_schema"]
    """`text` is free text, `json_object` any JSON object, `json_schema` JSON that follows the schema."""
    name: str | None = None
    """The schema's name."""
    description: str | None = None
    """Accepted and ignored."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON schema of the answer."""
    strict: bool | None = None
    """Has no effect: the schema is always enforced."""

    def for_chat(self) -> dict[str, Any]:
        fields = self.sent()
        kind = fields.pop("type")
        return {"type": kind, "json_schema": fields} if fields or kind == "json_schema" else {"type": kind}

    def sent(self) -> dict[str, Any]:
        """The fields that the client set."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class TextConfig(WireInput):
    """Settings of the answer's text."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat = TextFormat(type="text")
    """The format that the text follows."""


class ReasoningConfig(WireInput):
    """Settings of the model's reasoning. Reasoning is returned in full, never summarized."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"context"})
    NEUTRAL: ClassVar[Neutral] = {"generate_summary": ("auto",), "mode": ("standard",), "summary": ("auto",)}

    effort: str | None = None
    """Chat's `reasoning_effort`."""


class ResponsesBody(SharedBody):
    """A conversation so far, or its next turn."""

    IGNORED: ClassVar[frozenset[str]] = SharedBody.IGNORED | {"stream_options", "max_tool_calls"}
    NEUTRAL: ClassVar[Neutral] = {
        **UNSUPPORTED_OPTIONS,
        "access_programs": (),
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "frequency_penalty": (0.0,),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "image": (),
        "logit_bias": (),
        "logprobs": (False,),
        "max_completion_tokens": (),
        "max_output_tokens": (NO_LIMIT,),
        "max_tokens": (),
        "messages": (),
        "min_p": (0.0,),
        "min_tokens": (0,),
        "moderation": (),
        "n": (1,),
        "presence_penalty": (0.0,),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_logprobs": (),
        "repetition_penalty": (1.0,),
        "skip_special_tokens": (True,),
        "stop": (),
        "stop_token_ids": (),
        "top_k": (0, -1),
        "top_logprobs": (0,),
    }

    input: Items
    """A message of the user as text, or a list of items: messages, function calls and their outputs, reasoning."""
    instructions: str | None = None
    """A system message before all others. It applies to this request only."""
    previous_response_id: Annotated[str, Field(max_length=MAX_RESPONSE_ID)] | None = None
    """A stored response to continue: its whole conversation comes before `input`."""
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Maximum number of tokens to generate, including reasoning and calls. If it is left out: as many as fit."""
    store: bool = True
    """Whether the response is kept in memory, for `previous_response_id` and `GET`, until newer ones replace it."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """`disabled`: a conversation that does not fit the context is refused. `auto`: the oldest messages are left out
    until there is room for `max_output_tokens` or, if that is not given, for a quarter of the context. Instructions,
    system messages at the beginning and the last message always stay."""
    text: TextConfig = TextConfig()
    """The format of the answer."""
    tools: FlatTools = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: FlatToolChoice = "auto"
    """`none`: the model does not see the tools. `auto`: it may call them. `required`: it must call one or more. An
    object: it must call that function."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""
    reasoning: ReasoningConfig = ReasoningConfig()
    """Settings of the model's reasoning."""
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] = Field(default_factory=list)
    """Only `reasoning.encrypted_content`, which has no effect: reasoning items have their text and can be sent back."""
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    """Switches of the chat template."""

    def for_chat(self, earlier: Sequence[ChatMessageFields]) -> dict[str, Any]:
        """The same request as a chat body, with the messages of `earlier` turns before those of `input`."""
        same = {*SharedBody.model_fields, "parallel_tool_calls", "chat_template_kwargs"}
        choice = self.tool_choice.for_chat() if isinstance(self.tool_choice, NamedFunction) else self.tool_choice
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return {
            **self.model_dump(include=same, exclude_unset=True),
            "messages": [*system, *earlier, *messages_of(self.input)],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
            "tools": [tool.for_chat() for tool in self.tools] or None,
            "tool_choice": choice if "tool_choice" in self.model_fields_set else None,
        }

    def returned(self) -> dict[str, Any]:
        """The fields of the response that repeat those of the request."""
        choice = self.tool_choice
        return {
            "previous_response_id": self.previous_response_id,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "text": {"format": self.text.format.sent()},
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools],
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            # The metadata of a collected request is for its scorer and may be long: it is not returned.
            "metadata": {} if self.collect_trajectory else self.metadata or {},
            "store": self.store,
            "background": False,
            "truncation": self.truncation,
        }
