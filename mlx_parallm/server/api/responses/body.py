"""The body of `POST /v1/responses`: OpenAI's Responses API for a server that does not run tools itself.

A body is translated into a chat body, which is validated too, so both routes have the same limits.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)

from mlx_parallm.errors import shown
from mlx_parallm.server.api.bodies import NO_LIMIT, UNSUPPORTED_OPTIONS, SharedBody, TokenLimit, is_shallow
from mlx_parallm.server.api.conversation import (
    MAX_ARGUMENT_DEPTH,
    MAX_MESSAGES,
    RefusalPart,
    TemplateVariables,
    joined_parts,
)
from mlx_parallm.server.api.fields import (
    INT32_MAX,
    Neutral,
    WireInput,
    ignored_part,
    read_nested,
    refused,
)
from mlx_parallm.server.api.tools import MAX_TOOLS

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


class _NamedTool(_ClientTool):
    """A function or a custom tool."""

    NEUTRAL: ClassVar[Neutral] = {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,)}

    type: str
    name: str
    """The tool's name."""
    description: str | None = None
    """What the tool does, for the model."""


class FlatTool(_NamedTool):
    """A function that the client runs, in the flat form of this API."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"output_schema"})

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None
    """If one function is strict, the arguments of all calls follow their schemas."""

    def offered(self, path: str, namespace: str | None = None) -> Iterator[OfferedTool]:
        fields = self.model_dump(exclude={"type"}, exclude_none=True)
        yield OfferedTool(path, {**fields, "name": shown_name(self.name, namespace)}, self.name, namespace)


class CustomTool(_NamedTool):
    """A tool that takes a text and no JSON. The model sees a function with one string."""

    type: Literal["custom"]
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


def _type_of(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def _member(value: object, info: ValidationInfo) -> WireInput:
    if (kind := _type_of(value)) not in MEMBERS:
        raise refused("a namespace has functions and custom tools", "type")
    return read_nested(MEMBERS[kind], value, info)


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
        return read_nested(KINDS[kind], value, info)
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
        return read_nested(AllowedChoice, value, info)
    if kind not in ("function", "custom"):
        raise refused("this server runs no tools itself; only functions can be chosen", "type")
    return read_nested(NamedChoice, value, info)


ToolChoice = Annotated[
    str | NamedChoice | AllowedChoice,
    PlainValidator(
        _tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedChoice | AllowedChoice
    ),
]


ChatMessageFields = dict[str, Any]
"""The fields of a message, as chat's `Message` validates them."""
MAX_ITEM_ID = 128


class ItemText(WireInput):
    """A part of a message's content."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    """Either value, for any role."""
    text: str
    """The text."""


Text = Annotated[
    str,
    BeforeValidator(
        joined_parts(ItemText, "input_text", "output_text", "refusal"),
        json_schema_input_type=str | list[ItemText | RefusalPart],
    ),
]


class MessageItem(WireInput):
    """A message."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    """May be left out."""
    role: Literal["system", "developer", "user", "assistant"]
    """The author. `developer` is the newer name of `system`."""
    content: Text
    """Text, or a list of text parts."""

    def message(self) -> ChatMessageFields:
        return {"role": self.role, "content": self.content}


class _CallItem(WireInput):
    """A call that the model made."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "caller"})
    NEUTRAL: ClassVar[Neutral] = {"async": (False,)}

    type: str
    call_id: str
    """The id by which the item with the output refers to the call."""
    name: str
    """The name of what was called."""
    namespace: str | None = None
    """The namespace that it is in, if it is in one."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """An `incomplete` call was cut off; it was never run and is left out of the prompt."""

    @property
    @abstractmethod
    def json_arguments(self) -> str:
        """The arguments as the model wrote them."""

    def message(self) -> ChatMessageFields:
        if self.status == "incomplete":
            return {}
        function = {"name": shown_name(self.name, self.namespace), "arguments": self.json_arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}


class CallItem(_CallItem):
    """A function call that the model made."""

    type: Literal["function_call"]
    arguments: str
    """JSON text."""

    @property
    def json_arguments(self) -> str:
        return self.arguments


class CustomCallItem(_CallItem):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    input: str
    """The text for the tool."""

    @property
    def json_arguments(self) -> str:
        return json.dumps({INPUT: self.input}, ensure_ascii=False)


class CallOutputItem(WireInput):
    """The output of a function or a custom tool that was called."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "caller", "name", "namespace"})

    type: Literal["function_call_output", "custom_tool_call_output"]
    """Either value: the id says which call it was."""
    call_id: str
    """The id of the call."""
    output: Text
    """Text, or a list of text parts."""

    def message(self) -> ChatMessageFields:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class ReasoningPart(WireInput):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text", "summary_text", "text"]
    """Any value."""
    text: str
    """The text."""


class ReasoningItem(WireInput):
    """The model's reasoning. The encrypted form of other servers is ignored."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"id", "status", "encrypted_content"})

    type: Literal["reasoning"]
    content: list[ReasoningPart] = Field(default_factory=list)
    """The reasoning."""
    summary: list[ReasoningPart] = Field(default_factory=list)
    """What another server says of reasoning that it does not show. It is read if there is no `content`."""

    def message(self) -> ChatMessageFields:
        """The chat message of the reasoning; empty without a text."""
        reasoning = "".join(part.text for part in self.content) or "\n\n".join(part.text for part in self.summary)
        return {"role": "assistant", "reasoning_content": reasoning} if reasoning else {}


KEPT_ITEMS: Mapping[str, tuple[str, ...]] = {
    "apply_patch_call": ("operation",),
    "apply_patch_call_output": ("status", "output"),
    "code_interpreter_call": ("code", "outputs"),
    "computer_call": ("action", "actions"),
    "file_search_call": ("queries", "results"),
    "image_generation_call": ("revised_prompt",),
    "local_shell_call": ("action",),
    "local_shell_call_output": ("output",),
    "mcp_approval_request": (),
    "mcp_call": ("server_label", "name", "arguments", "output", "error"),
    "mcp_list_tools": (),
    "program": ("code",),
    "program_output": ("result",),
    "shell_call": ("action",),
    "shell_call_output": ("output",),
    "tool_search_call": (),
    "web_search_call": ("action", "results"),
}
"""The fields of the items about other servers' tools that the model reads."""


class KeptItem(BaseModel):
    """What a tool that another server runs did. The model reads it as JSON text; an item that says nothing adds nothing
    to the prompt."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: Annotated[str, Field(json_schema_extra={"enum": [*KEPT_ITEMS]})]
    """Which kind of tool it was. The other fields are those of OpenAI's item."""

    @model_validator(mode="after")
    def _check_depth(self) -> KeptItem:
        if not is_shallow(self.model_extra, MAX_ARGUMENT_DEPTH):
            raise refused(f"is nested deeper than {MAX_ARGUMENT_DEPTH} levels")
        return self

    def message(self) -> ChatMessageFields:
        fields = self.model_extra or {}
        kept = {name: fields[name] for name in KEPT_ITEMS[self.type] if fields.get(name)}
        role = "user" if self.type.endswith("_output") else "assistant"
        return {"role": role, "content": f"[{self.type}] {json.dumps(kept, ensure_ascii=False)}"} if kept else {}


class ItemReference(WireInput):
    """An item of a stored response, which takes its place."""

    type: Literal["item_reference"] = "item_reference"
    """May be left out."""
    id: Annotated[str, Field(max_length=MAX_ITEM_ID)]
    """The item's id."""

    def message(self) -> ChatMessageFields:
        raise AssertionError("the item takes the place of a reference first")


InputItem = MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | KeptItem | ItemReference
ITEM_TYPES: Mapping[object, type[InputItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
    **dict.fromkeys(KEPT_ITEMS, KeptItem),
}


def _item(value: object, info: ValidationInfo) -> InputItem:
    if isinstance(value, InputItem):
        return value
    if not isinstance(value, dict):
        raise refused("must be an item: an object with a type")
    kind = value.get("type") or ("item_reference" if value.keys() == {"id"} else "message")
    if not isinstance(kind, str) or kind not in ITEM_TYPES:
        raise refused(
            f"items of the type {shown(str(kind))} cannot be kept without changing what the conversation says; leave "
            f"them out. Those that can: {', '.join(map(str, ITEM_TYPES))}",
            "type",
        )
    model: type[Any] = ITEM_TYPES[kind]
    item: InputItem = read_nested(model, value, info)
    return item


Item = Annotated[InputItem, PlainValidator(_item, json_schema_input_type=InputItem)]
ITEM_LIST: TypeAdapter[list[InputItem]] = TypeAdapter(list[Item])


def messages_of(items: Iterable[InputItem]) -> list[ChatMessageFields]:
    """The items as chat messages. Reasoning, text and calls of the assistant that follow each other become one message.
    A second text begins a new message, and so does reasoning that comes after text or calls."""
    messages: list[ChatMessageFields] = []
    for message in filter(None, (item.message() for item in items)):
        if messages and _continues(messages[-1], message):
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _continues(before: ChatMessageFields, message: ChatMessageFields) -> bool:
    if not before["role"] == message["role"] == "assistant":
        return False
    if "tool_calls" in message:
        return True
    return "content" not in before and ("content" in message or "tool_calls" not in before)


def _joined(before: ChatMessageFields, message: ChatMessageFields) -> ChatMessageFields:
    added = {name: value for name, value in message.items() if name != "role"}
    return before | {name: before[name] + value if name in before else value for name, value in added.items()}


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
