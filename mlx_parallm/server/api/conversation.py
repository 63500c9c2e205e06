"""The messages of a conversation as clients send them, and the prompt that the model's chat template makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)

from mlx_parallm.core.text import RESERVED_VARIABLES, TextTokenizer, Tool, is_free_variable
from mlx_parallm.core.tool_text import TemplateMessage, calls_as_text, lost_result, read_arguments, tools_as_text
from mlx_parallm.errors import ConfigError, InvalidRequestError, shown
from mlx_parallm.server.api.bodies import is_shallow
from mlx_parallm.server.api.fields import Neutral, WireInput, nested, read_nested, refused

if TYPE_CHECKING:
    from mlx_parallm.model.tools.formats import ToolFormat

MAX_MESSAGES = 4096
MAX_CALLS = 128
"""Largest number of calls in one message."""
MAX_CALL_NAME, MAX_CALL_ID, MAX_ARGUMENTS = 256, 256, 1024 * 1024


MAX_ARGUMENT_DEPTH = 64


def _shallow(arguments: dict[str, Any]) -> dict[str, Any]:
    if not is_shallow(arguments, MAX_ARGUMENT_DEPTH):
        raise refused(f"is nested deeper than {MAX_ARGUMENT_DEPTH} levels")
    return arguments


CallArguments = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""The arguments of a call in APIs that have them as an object."""


class TextPart(WireInput):
    """One part of a message's content."""

    type: Literal["text"]
    text: str
    """The text."""


class RefusalPart(WireInput):
    """A part of the assistant's content that says why it does not answer."""

    type: Literal["refusal"]
    refusal: str
    """The text."""

    @property
    def text(self) -> str:
        return self.refusal


def joined_parts(text: type[WireInput], *types: str) -> Callable[[object, ValidationInfo], object]:
    """A validator of content: it returns the text of a list of parts, one part per line, and other values unchanged.

    Args:
        text: what parts with text are; the others are refusals.
        types: of the parts that a client may send.
    """

    def read(value: dict[str, Any], info: ValidationInfo) -> WireInput:
        return read_nested(RefusalPart if value["type"] == "refusal" else text, value, info)

    adapter: TypeAdapter[list[Any]] = TypeAdapter(list[Annotated[Any, PlainValidator(read)]])

    def joined(value: object, info: ValidationInfo) -> object:
        if not isinstance(value, list):
            return value
        _check_text_parts(value, *types)
        with nested(info):
            parts = adapter.validate_python(value, context=info.context)
        return "\n".join(part.text for part in parts)

    return joined


def _check_text_parts(parts: Sequence[object], *types: str) -> None:
    """Raises an error that names the first part which is no text, such as an image. `types`: of parts with text."""
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types:
            what = f"the part of type {shown(kind)}" if isinstance(kind, str) else "what is no part"
            raise refused(
                f'this model reads only text; leave out {what}, or send {{"type": "{types[0]}", "text": …}} in its '
                "place",
                number,
            )


Content = Annotated[
    str,
    BeforeValidator(
        joined_parts(TextPart, "text", "refusal"), json_schema_input_type=str | list[TextPart | RefusalPart]
    ),
]


def _as_text(value: object) -> object:
    """The JSON text of an object, as some clients send arguments. Other values are returned unchanged."""
    return json.dumps(_shallow(value), ensure_ascii=False) if isinstance(value, dict) else value


class GivenFunction(WireInput):
    """The function that an earlier message called."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_CALL_NAME)]
    """The function's name."""
    arguments: Annotated[
        str, Field(max_length=MAX_ARGUMENTS), BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any])
    ] = ""
    """JSON text, or an object. If it is the text of an object, the chat template gets the object."""


class GivenCall(WireInput):
    """A tool call in an earlier message of the assistant."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"index"})
    NEUTRAL: ClassVar[Neutral] = {"custom": ()}

    id: Annotated[str, Field(max_length=MAX_CALL_ID)]
    """The id from the assistant's answer."""
    type: Literal["function"] = "function"
    """Always this value."""
    function: GivenFunction
    """The function that was called."""

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": read_arguments(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class Message(WireInput):
    """One message of the conversation."""

    NEUTRAL: ClassVar[Neutral] = {"annotations": (), "audio": (), "function_call": (), "images": ()}
    INSTEAD: ClassVar[Mapping[str, str]] = {"function_call": "tool_calls"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """The author of the message. `developer` means `system`."""
    content: Content | None = None
    """Text, or a list of text parts. Optional for the assistant."""
    refusal: str | None = None
    """Why the assistant did not answer, as other servers say it. It is read if there is no content."""
    name: str | None = None
    """The author's name, for templates that use it."""
    tool_calls: Annotated[list[GivenCall], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    """The calls that the assistant made."""
    tool_call_id: Annotated[str, Field(max_length=MAX_CALL_ID)] | None = None
    """For a message of a tool: the id of the call whose result it contains."""
    reasoning_content: str | None = None
    """The assistant's reasoning."""
    reasoning: str | None = None
    """vLLM's name for `reasoning_content`."""

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise refused("required for this role", "content")
        if self.tool_calls and self.role != "assistant":
            raise refused("only the assistant's messages have them", "tool_calls")
        if self.tool_call_id is None and self.role == "tool":
            raise refused("required for this role: the id of the call whose result this is", "tool_call_id")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it. The templates do not know `developer`, the newer name of `system`."""
        reasoning = self.reasoning_content or self.reasoning
        calls = [call.for_template() for call in self.tool_calls]
        fields = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or self.refusal or "",
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
            "tool_calls": calls or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def _with_calls(messages: list[Message]) -> list[Message]:
    turns = [(each.role, [call.id for call in each.tool_calls], each.tool_call_id) for each in messages]
    if (index := lost_result(turns)) is not None:
        lost = shown(str(turns[index][2]))
        raise refused(f"no earlier message has the call {lost}, whose result this is; send that message too", index)
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_with_calls)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is rendered from: messages as the model's chat template takes them, and the template's variables.

    `tool_format`: how the model writes calls. If its template does not support tools, `turns` has them as text.
    `template`: the template; None is the model's own. `open_ended`: the prompt ends with the text of the last message,
    which the answer continues. `optional`: the variables that are left out if the template refuses the messages with
    them.
    """

    turns: tuple[TemplateMessage, ...]
    variables: Mapping[str, Any]
    tool_format: ToolFormat
    template: str | None = None
    open_ended: bool = False
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        tokenizer: TextTokenizer,
        variables: Mapping[str, Any] = MappingProxyType({}),
        template: str | None = None,
        open_ended: bool = False,
        optional: frozenset[str] = frozenset(),
    ) -> Conversation:
        """The conversation of a request."""
        turns: Sequence[TemplateMessage] = [message.for_template() for message in messages]
        variables, tool_format = dict(variables), tokenizer.tool_format
        if not tool_format.in_template:
            turns = tools_as_text(turns, tools, tool_format)
        elif tools:
            variables["tools"] = list(tools)
        return cls(tuple(turns), variables, tool_format, template, open_ended, optional)

    def first(self, count: int) -> Conversation:
        """The conversation up to its first `count` messages."""
        return replace(self, turns=self.turns[:count])

    def with_answer(self, answer: TemplateMessage) -> Conversation:
        """The conversation with one more message, of the assistant."""
        if not self.tool_format.in_template:
            answer = calls_as_text(answer, self.tool_format)
        return replace(self, turns=(*self.turns, answer))

    def render(
        self, tokenizer: TextTokenizer, add_generation_prompt: bool = True, at_most: int | None = None
    ) -> list[int]:
        """The token ids of the prompt. If the template refuses the messages, they are sent to it in other forms; see
        `_forms`. Call it in a worker thread.

        Raises:
            ContextLengthError: the prompt has far more than `at_most` token ids.
            Also the other errors of `TextTokenizer.apply_chat_template`.
        """

        def rendered(turns: Sequence[TemplateMessage]) -> list[int]:
            return tokenizer.apply_chat_template(
                turns,
                add_generation_prompt,
                at_most,
                template=self.template,
                continue_final_message=self.open_ended,
                **self.variables,
            )

        *forms, last = self._forms(tokenizer)
        for form in forms:
            with suppress(InvalidRequestError):
                return rendered(form)
        try:
            return rendered(last)
        except InvalidRequestError:
            if not self.optional:
                raise
        kept = {name: value for name, value in self.variables.items() if name not in self.optional}
        plain = replace(self, variables=kept, optional=frozenset())
        return plain.render(tokenizer, add_generation_prompt, at_most)

    def _forms(self, tokenizer: TextTokenizer) -> list[Sequence[TemplateMessage]]:
        """The same texts as messages that more and more templates take. Clients send system messages anywhere, and
        several messages of one role in a row. Some templates take a system message only at the beginning, or leave out
        those that come later, and the others only in turns of user and assistant."""
        placed = _in_place(self.turns)
        forms: list[Sequence[TemplateMessage]] = [placed]
        if placed != self.turns and _writes_later_system(tokenizer, self.template):
            forms.insert(0, self.turns)
        if (joined := tuple(merged(placed))) != placed:
            forms.append(joined)
        return forms


def _in_place(turns: Sequence[TemplateMessage]) -> tuple[TemplateMessage, ...]:
    """The messages without system messages after the beginning. Each is a part of the message before it, if the user or
    a tool wrote that, or else a message of the user. So the prompt stays as it was up to there, and the prefix cache
    has it."""
    placed: list[TemplateMessage] = []
    for turn in turns:
        if turn["role"] != "system" or not placed or placed[-1]["role"] == "system":
            placed.append(turn)
        elif placed[-1]["role"] == "assistant":
            placed.append({**turn, "role": "user"})
        else:
            placed[-1] = _joined(placed[-1], {"content": turn["content"]})
    return tuple(placed)


def merged(messages: Iterable[TemplateMessage]) -> Iterator[dict[str, Any]]:
    """Messages of one role and name that follow each other become one, except results of tools."""
    last: dict[str, Any] = {}
    for message in messages:
        if last and _is_continued(last, message):
            last = _joined(last, message)
            continue
        if last:
            yield last
        last = dict(message)
    if last:
        yield last


def _is_continued(before: TemplateMessage, turn: TemplateMessage) -> bool:
    return before["role"] == turn["role"] != "tool" and before.get("name") == turn.get("name")


def _joined(before: TemplateMessage, turn: TemplateMessage) -> dict[str, Any]:
    """Texts are joined by a line break, and lists of calls become one."""
    joined = {**before, **turn}
    for name in ("content", "reasoning_content"):
        if texts := [each[name] for each in (before, turn) if each.get(name)]:
            joined[name] = "\n".join(texts)
    if calls := [*before.get("tool_calls", ()), *turn.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _writes_later_system(tokenizer: TextTokenizer, template: str | None) -> bool:
    """Whether the template writes a system message that comes after another message."""
    user = {"role": "user", "content": "x"}
    try:
        one, other = (
            tokenizer.apply_chat_template([user, {"role": "system", "content": text}], template=template)
            for text in ("a", "b")
        )
    except InvalidRequestError:
        return False
    return one != other


MAX_VARIABLES, MAX_VARIABLE_NAME = 64, 64
MAX_VARIABLES_BYTES, MAX_VARIABLES_DEPTH = 64 * 1024, 16
TEMPLATES = "*.jinja"


def _variables(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_VARIABLES:
        raise refused(f"must be an object of at most {MAX_VARIABLES} variables")
    for name in value:
        if not is_free_variable(name):
            raise refused("is not a free variable of the chat template; some have a field of their own", name)
        if not name.isidentifier() or len(name) > MAX_VARIABLE_NAME:
            raise refused(f"each name must be an identifier of at most {MAX_VARIABLE_NAME} characters")
    if not is_shallow(value, MAX_VARIABLES_DEPTH):
        raise refused(f"is nested deeper than {MAX_VARIABLES_DEPTH} levels")
    if len(json.dumps(value)) > MAX_VARIABLES_BYTES:
        raise refused(f"has more than {MAX_VARIABLES_BYTES} bytes as JSON")
    return {name: variable for name, variable in value.items() if variable is not None}


_Names = {
    "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
    "maxLength": MAX_VARIABLE_NAME,
    "not": {"enum": sorted(RESERVED_VARIABLES)},
}
TemplateVariables = Annotated[
    dict[str, Any],
    PlainValidator(
        _variables,
        json_schema_input_type=Annotated[
            dict[str, Any], Field(max_length=MAX_VARIABLES, json_schema_extra={"propertyNames": _Names})
        ],
    ),
]
"""Variables of the chat template, such as `enable_thinking`. Those that are null count as left out."""


def read_templates(folder: Path | None) -> Mapping[str, str]:
    """The chat templates of a folder by their files' names without `.jinja`.

    Raises:
        ConfigError: the folder has none, or a file cannot be read.
    """
    if folder is None:
        return {}
    try:
        templates = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob(TEMPLATES))}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_dir: {folder}: {error}") from None
    if not templates:
        raise ConfigError(f"chat_template_dir: {folder} has no file that ends with .jinja")
    return templates


def chosen_template(asked: str | None, own: str | None, allowed: Mapping[str, str]) -> str | None:
    """The template that a request asks for by its name or its text; None for the model's `own`.

    Raises:
        InvalidRequestError: it is neither the model's own nor one that the operator allows.
    """
    if asked is None or asked == own:
        return None
    if asked in allowed:
        return allowed[asked]
    if asked in allowed.values():
        return asked
    choice = f"send one of the names {', '.join(allowed)}" if allowed else "leave it out"
    raise InvalidRequestError(
        "chat_template: this is neither the model's own template, which GET /tokenizer_info has, nor one that the "
        f"operator allows with --chat-template-dir. A template is a program, so that of a client is not run: {choice}, "
        "or render it yourself and send the token ids to /v1/completions.",
        param="chat_template",
    )
