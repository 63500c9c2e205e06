"""The body and the answers of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from mlx_parallm.server.api.answer import AnswerObject, Usage
from mlx_parallm.server.api.chat.messages import Messages
from mlx_parallm.server.api.chat.template import TemplateVariables
from mlx_parallm.server.api.chat.tools import ToolCallingBody
from mlx_parallm.server.api.fields import INT32_MAX, FinishReasonText, Neutral, NonEmptyTokenIds, WireOutput, refused
from mlx_parallm.server.api.generation_fields import UNSUPPORTED_OPTIONS
from mlx_parallm.server.api.logprobs import ChatLogprobs, PromptLogprobs
from mlx_parallm.server.api.repairs import RepairedCall
from mlx_parallm.server.api.sampling_fields import NO_LIMIT, Candidates, TopLogprobs, widest

MAX_EFFORT = 32
EFFORT = "reasoning_effort"


def _logprobs(value: object) -> bool | int:
    if isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= INT32_MAX):
        return value
    raise refused("must be true, false, or a number from 0")


def _not_zero(value: int) -> int:
    if value == 0:
        raise refused("must be at least 1, or -1")
    return value


AnswerLimit = Annotated[
    int, Field(ge=NO_LIMIT, le=INT32_MAX, json_schema_extra={"not": {"const": 0}}), AfterValidator(_not_zero)
]
SwitchOrTop = Annotated[bool | int, PlainValidator(_logprobs, json_schema_input_type=bool | TopLogprobs)]


class ChatBody(ToolCallingBody):
    """A conversation, and how to continue it."""

    IGNORED: ClassVar[frozenset[str]] = ToolCallingBody.IGNORED - {"reasoning_effort"}
    NEUTRAL: ClassVar[Neutral] = {
        **UNSUPPORTED_OPTIONS,
        "audio": (),
        "documents": (),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": (),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
    }
    INSTEAD: ClassVar[Mapping[str, str]] = {"function_call": "tool_choice", "functions": "tools"}

    messages: Messages
    """The conversation so far."""
    prompt_token_ids: NonEmptyTokenIds | None = None
    """The token ids of the whole prompt, which are used as they are instead of rendering `messages`."""
    max_tokens: AnswerLimit | None = None
    """Maximum number of tokens to generate. If it is left out, the model's own default or the context limits the
    answer; with -1, only the context does."""
    max_completion_tokens: AnswerLimit | None = None
    """The newer name of `max_tokens`."""
    logprobs: SwitchOrTop = False
    """Whether to return the logprobs of the generated tokens. A number means what it means in completions: return them,
    and those of this many most likely tokens at each position."""
    top_logprobs: TopLogprobs = 0
    """Number of most likely tokens to return at each position as well; needs `logprobs`. It is at most 20, unless the
    operator allows more with `--max-logprobs`."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of the assistant's message."""
    continue_final_message: bool = False
    """Whether the answer continues the text of the last message, which the template does not end then. It needs
    `add_generation_prompt` false. The answer has only what is new."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """The name or the text of a template that the operator allows with `--chat-template-dir`, or the text of the
    model's own, which `/tokenizer_info` has: a template is a program, and a client's is not run."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: Annotated[str, Field(max_length=MAX_EFFORT)] | None = None
    """How much the model reasons, such as `low`, `medium` or `high`: the chat template's variable of this name. It has
    no effect if the template does not have it, or not this value."""

    def effort_variable(self, template: str) -> dict[str, str]:
        """The variable for `reasoning_effort`, if the chat template has it and `chat_template_kwargs` does not."""
        effort, free = self.reasoning_effort, EFFORT not in self.chat_template_kwargs
        return {EFFORT: effort} if effort is not None and free and EFFORT in template else {}

    @property
    def task_prompt(self) -> str | None:
        """The last message of the user."""
        return next((message.content for message in reversed(self.messages) if message.role == "user"), None)

    @property
    def given_prompt(self) -> list[int] | None:
        """The token ids of the prompt, if the client gives them."""
        return self.prompt_token_ids

    @property
    def token_limit(self) -> int | None:
        given = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        return next((limit for limit in given if limit != NO_LIMIT), given[0] if given else None)

    @property
    def candidates(self) -> Candidates:
        if self.logprobs is False:
            return Candidates("logprobs")
        top = Candidates("top_logprobs", self.top_logprobs)
        return top if self.logprobs is True else widest([top, Candidates("logprobs", self.logprobs)])

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and self.logprobs is False:
            raise refused("needs logprobs: true", "top_logprobs")
        if self.stream and self.prompt_logprobs is not None:
            raise refused("not available with stream", "prompt_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None, NO_LIMIT}
        if len(limits) > 1:
            raise refused("differs from max_completion_tokens, its newer name; send one", "max_tokens")
        if self.continue_final_message:
            self._check_continued()
        if self.episode_id is not None and (self.continue_final_message or self.chat_template is not None):
            name = "continue_final_message" if self.continue_final_message else "chat_template"
            raise refused("not supported with episode_id, whose turns the server renders", name)
        return self

    def _check_continued(self) -> None:
        if self.add_generation_prompt:
            raise refused("needs add_generation_prompt: false", "continue_final_message")
        if self.given_prompt is not None:
            raise refused("needs messages, not token ids", "continue_final_message")
        if not self.messages[-1].content or self.messages[-1].tool_calls:
            raise refused("the last message must have a text and no calls", "continue_final_message")


class ChatTokensBody(ChatBody):
    """A conversation with the tokens of its prompt, which the client has rendered or continued by itself."""

    tokens: NonEmptyTokenIds
    """The token ids of the whole prompt, used as they are. `messages` and `tools` only say what the answer may call."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.prompt_token_ids not in (None, self.tokens):
            raise refused("differs from tokens; send one of them", "prompt_token_ids")
        return self

    @property
    def given_prompt(self) -> list[int] | None:
        return self.tokens


class CalledFunction(WireOutput):
    """The function that is called, or what a chunk adds to it."""

    name: str | None = None
    """The function's name; in a stream, only in the first chunk of the call."""
    arguments: str
    """JSON text, or a part of it. It may be incomplete in the last call of an answer that was cut off."""


class Call(WireOutput):
    """A tool call."""

    id: str
    """The id by which the message with the result refers to the call."""
    type: Literal["function"]
    function: CalledFunction
    """The function that is called."""


class CallDelta(WireOutput):
    """The part of a tool call that a chunk adds."""

    index: int
    """The call's position in the answer."""
    id: str | None = None
    """The call's id; only in the first chunk of the call."""
    type: Literal["function"] | None = None
    """The kind of tool; only in the first chunk of the call."""
    function: CalledFunction
    """The part that is added."""


class ChatMessage(WireOutput):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    """The text; null if there are only calls or reasoning."""
    reasoning_content: str | None = None
    """The reasoning before the answer, for models that mark it."""
    reasoning: str | None = None
    """vLLM's name for `reasoning_content`."""
    tool_calls: list[Call] | None = None
    """The functions that the model calls."""


class ChatDelta(WireOutput):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    """The message's author; only in the first chunk of each choice."""
    content: str | None = None
    """More text."""
    reasoning_content: str | None = None
    """More reasoning."""
    reasoning: str | None = None
    """vLLM's name for `reasoning_content`."""
    tool_calls: list[CallDelta] | None = None
    """More of the tool calls."""


ChatFinishReason = FinishReasonText | Literal["tool_calls"]
"""`tool_calls`: the model called tools, because it chose to or because the request required a call of any tool. If the
request named the function to call, the reason is `stop`."""


class ChatChoice(WireOutput):
    """One of the `n` answers."""

    LONG: ClassVar[bool] = True

    index: int
    """The answer's position among the `n`."""
    message: ChatMessage
    """The answer itself."""
    logprobs: ChatLogprobs | None
    """Logprobs of the generated tokens, if the request asked for them."""
    finish_reason: ChatFinishReason | None
    """Why the answer ended."""
    stop_reason: str | int | None = None
    """The stop string that ended the answer, or the token of `stop_token_ids`."""
    repaired_tool_calls: list[RepairedCall] | None = None
    """The calls that were repaired; absent if none was."""
    token_ids: list[int] | None = None
    """The generated tokens."""


class ChatChunkChoice(WireOutput):
    """What a chunk adds to one answer."""

    index: int
    """The answer's position among the `n`."""
    delta: ChatDelta
    """What is added to the message."""
    logprobs: ChatLogprobs | None
    """Logprobs of this chunk's tokens, if the request asked for them."""
    finish_reason: ChatFinishReason | None
    """Why the answer ended; null in a chunk before the last."""
    stop_reason: str | int | None = None
    """The stop string that ended the answer, or the token of `stop_token_ids`."""
    repaired_tool_calls: list[RepairedCall] | None = None
    """The calls that were repaired; absent if none was."""
    token_ids: list[int] | None = None
    """The generated tokens."""


class ChatCompletion(AnswerObject):
    """The whole answer."""

    LONG: ClassVar[bool] = True

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    """The `n` answers."""
    usage: Usage
    """Numbers of tokens."""
    prompt_token_ids: list[int] | None = None
    """The tokens of the rendered chat template, the same for all choices."""
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the rendered template, its logprob and those of likely tokens, by token id; null for the first
    token."""


class ChatCompletionChunk(AnswerObject):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    """The choice that the chunk adds to, or none."""
    prompt_token_ids: list[int] | None = None
    """The tokens of the rendered template, in the first chunk."""
