"""The body of `POST /v1/responses`: OpenAI's Responses API for a server that does not run tools itself.

A body is translated into a chat body, which is validated too, so both routes have the same limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from mlx_parallm.server.api.chat.messages import MAX_MESSAGES
from mlx_parallm.server.api.chat.template import TemplateVariables
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, WireInput, refused
from mlx_parallm.server.api.generation_fields import UNSUPPORTED_OPTIONS, SharedBody
from mlx_parallm.server.api.responses.conversation import ChatMessageFields, Item, messages_of
from mlx_parallm.server.api.responses.tools import OfferedTool, ToolChoice, Tools, offered_tools
from mlx_parallm.server.api.sampling_fields import NO_LIMIT, TokenLimit

MAX_RESPONSE_ID = 128
INCLUDED = (
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include` that have no effect."""


def _as_items(value: object) -> object:
    """A text becomes a message of the user."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def _without_effect(included: str) -> str:
    if included not in INCLUDED:
        raise refused(f"not supported by this server; leave it out. These have no effect: {', '.join(INCLUDED)}")
    return included


Items = Annotated[
    list[Item],
    BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    Field(max_length=MAX_MESSAGES),
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
    """Whether formats of texts that are not enforced are refused. All else of the schema is always enforced."""

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

    IGNORED: ClassVar[frozenset[str]] = SharedBody.IGNORED | {"client_metadata", "max_tool_calls", "stream_options"}
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
    """A message of the user as text, or a list of items: messages, calls and their outputs, reasoning. If the list is
    empty and there is nothing else to answer, the model is loaded and the response is empty."""
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
    tools: Tools = Field(default_factory=list)
    """Tools that the model may call and the client runs: functions, alone or in a namespace, and custom tools, which
    take a text. Tools of other types are left out, and the header x-ignored-fields names them."""
    tool_choice: ToolChoice = "auto"
    """`none`: the model does not see the tools. `auto`: it may call them. `required`: it must call one or more. An
    object: it must call that tool."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""
    reasoning: ReasoningConfig = ReasoningConfig()
    """Settings of the model's reasoning."""
    include: Annotated[list[Annotated[str, AfterValidator(_without_effect)]], Field(max_length=16)] = Field(
        default_factory=list
    )
    """Has no effect: reasoning items always have their whole text and can be sent back, and the other values are about
    tools that this server does not run."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""
    thinking_token_budget: TokenLimit | None = None
    """The most tokens of reasoning, as in chat."""

    def offered(self) -> list[OfferedTool]:
        """The tools as the model sees them."""
        return offered_tools(self.tools)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.input and self.instructions is None and self.previous_response_id is None

    def for_chat(self, earlier: Sequence[ChatMessageFields]) -> dict[str, Any]:
        """The same request as a chat body, with the messages of `earlier` turns before those of `input`."""
        same = {*SharedBody.model_fields, "parallel_tool_calls", "chat_template_kwargs", "thinking_token_budget"}
        choice = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.for_chat()
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return {
            **self.model_dump(include=same, exclude_unset=True),
            "messages": [*system, *earlier, *messages_of(self.input)],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
            "tools": [{"type": "function", "function": tool.function} for tool in self.offered()] or None,
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
            "tools": [tool.sent() for tool in self.tools if tool is not None],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            # The metadata of a collected request is for its scorer and may be long: it is not returned.
            "metadata": {} if self.collect_trajectory else self.metadata or {},
            "store": self.store,
            "background": False,
            "truncation": self.truncation,
        }
