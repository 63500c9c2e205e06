"""`POST /v1/chat/completions`: the engine's request for a conversation, and the answer. With `/tokens`, the client
gives the tokens of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import Depends
from pydantic import AfterValidator, Field, PlainValidator, model_validator
from starlette.responses import Response

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.requests import Event, FinishReason, GenerationRequest, PromptScored
from mlx_parallm.core.splitter import AnswerSyntax, CallPart, JoinedParts, Splitter, join_parts
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import (
    AnswerObject,
    ChoicePiece,
    ChoiceWriter,
    RepairedCall,
    Usage,
    Watch,
    ending,
    parts_of,
    repaired_fields,
)
from mlx_parallm.server.api.bodies import NO_LIMIT, UNSUPPORTED_OPTIONS, Candidates, TopLogprobs, widest
from mlx_parallm.server.api.conversation import Conversation, Messages, TemplateVariables, chosen_template
from mlx_parallm.server.api.fields import INT32_MAX, FinishReasonText, Neutral, NonEmptyTokenIds, WireOutput, refused
from mlx_parallm.server.api.histories import PlannedTurn
from mlx_parallm.server.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs, scored_prompt
from mlx_parallm.server.api.tools import NamedTool, ToolCallingBody, answer_grammar, answer_syntax
from mlx_parallm.server.body import json_body
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.request import RequestContext, generation_request, longest_text, tokens_as_ids
from mlx_parallm.server.request_log import new_request_id
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

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


router = Router()
Body = Annotated[ChatBody, Depends(json_body(ChatBody))]
TokensBody = Annotated[ChatTokensBody, Depends(json_body(ChatTokensBody))]


@router.post(
    "/v1/chat/completions",
    role=Role.INFERENCE,
    responses=streamable(ChatCompletion),
    examples={
        "a question": {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8},
        "as a stream": {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "for training": {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "n": 2,
            "max_tokens": 4,
            "collect_trajectory": True,
        },
    },
)
async def create_chat_completion(body: Body, services: ServicesDep) -> Response:
    """Continues a conversation, rendered with the model's own chat template."""
    return GenerationResponse(services, body, 1, partial(prepare, body, services))


@router.post(
    "/v1/chat/completions/tokens",
    role=Role.INFERENCE,
    responses=streamable(ChatCompletion),
    examples={
        "a question and its tokens": {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "tokens": [1, 2, 3],
            "max_tokens": 4,
        }
    },
)
async def create_chat_completion_of_tokens(body: TokensBody, services: ServicesDep) -> Response:
    """Continues a conversation whose prompt the client gives as `tokens`, so that a turn can extend the tokens of the
    turn before it. The answer is that of `/v1/chat/completions`."""
    return GenerationResponse(services, body, 1, partial(prepare, body, services))


def prepare(body: ChatBody, services: Services, context: RequestContext) -> ChatWriter:
    """Renders and tokenises the conversation, and builds the engine's request. Runs in a worker thread."""
    planned = plan_chat(new_request_id("chatcmpl"), body, services, context)
    return ChatWriter(
        body=body,
        request=planned.request,
        tokenizer=context.model.tokenizer,
        tokens_as_ids=tokens_as_ids(body, context.config),
        splitters=[Splitter(planned.syntax) for _ in range(planned.request.sequences)],
        watch=planned.watch,
    )


@dataclass(frozen=True, slots=True)
class PlannedChat:
    """The engine's request for a conversation, and the parts that its answers may contain. `watch`: see
    `AnswerWriter`."""

    request: GenerationRequest
    syntax: AnswerSyntax
    watch: Watch | None = None


def plan_chat(request_id: str, body: ChatBody, services: Services, context: RequestContext) -> PlannedChat:
    """Renders and tokenises a conversation, and makes the engine's request. A turn of an episode continues the tokens
    of an earlier one if it can; see `EpisodeHistories`. A prompt that the client gives as token ids is used as it is.

    Raises the errors of `conversation_of`, `Conversation.render`, `answer_grammar` and `generation_request`.
    """
    model, collection, histories, turn_key = context.model, context.collection, services.histories, None
    conversation = conversation_of(body, model)
    prompt = rendered = body.given_prompt or conversation.render(
        model.tokenizer, body.add_generation_prompt, longest_text(body, model.card)
    )
    if collection is not None:
        collection = replace(collection, messages=tuple(message.for_template() for message in body.messages))
        if collection.episode_id and body.given_prompt is None:
            turn_key = (context.key.name, collection.group_id, collection.episode_id)
            prompt, unmatched = histories.prompt_of(turn_key, conversation, model.tokenizer, rendered)
            collection = replace(collection, unmatched=unmatched)
    # What may be trained on is kept as it was sampled.
    for_training = collection is not None or body.given_prompt is not None or body.return_token_ids
    repairs = context.config.repair_tool_calls and not for_training
    syntax = answer_syntax(body, prompt, model.tokenizer, services.metrics.observe_repair if repairs else None)
    grammar = answer_grammar(body, syntax, model.grammars)
    context = replace(context, collection=collection)
    request = generation_request(context, request_id, body, [prompt], grammar, syntax.visible_specials)
    if turn_key is None:
        return PlannedChat(request, syntax)
    turn = PlannedTurn(turn_key, conversation, rendered, syntax)
    return PlannedChat(request, syntax, partial(histories.recorded, turn, request))


def conversation_of(body: ChatBody, model: ServedModel) -> Conversation:
    """Raises InvalidRequestError if the body asks for a chat template that is not allowed."""
    tokenizer = model.tokenizer
    template = chosen_template(body.chat_template, tokenizer.chat_template, model.templates)
    effort = body.effort_variable(template or tokenizer.chat_template or "")
    return Conversation.of(
        body.messages,
        body.callable_tools,
        tokenizer,
        {**body.chat_template_kwargs, **effort},
        template,
        body.continue_final_message,
        optional=frozenset(effort),
    )


def prompt_of(body: ChatBody, model: ServedModel) -> list[int]:
    """The token ids of the rendered conversation. Call it in a worker thread.

    Raises:
        InvalidRequestError: the model has no template, or the template refuses the messages.
        ContextLengthError: the conversation is far too long.
    """
    conversation, at_most = conversation_of(body, model), longest_text(body, model.card)
    return conversation.render(model.tokenizer, body.add_generation_prompt, at_most)


@dataclass(kw_only=True, eq=False)
class ChatWriter(ChoiceWriter[ChatBody]):
    """Writes the choices of a chat as whole messages, or as the deltas of a stream. All choices answer one prompt, and
    each has its own splitter."""

    splitters: Sequence[Splitter]

    def _pieces(self, event: Event) -> Iterator[ChoicePiece]:
        for piece in super()._pieces(event):
            yield replace(piece, parts=tuple(parts_of(self.splitters[piece.index], piece)))

    def _is_visible(self, piece: ChoicePiece) -> bool:
        return bool(piece.parts) or super()._is_visible(replace(piece, text=""))

    def _chunk(self, pieces: Sequence[ChoicePiece], fields: dict[str, Any]) -> ChatCompletionChunk:
        ids = {} if self._begun else self._prompt_ids()
        choices = [self._delta(piece) for piece in pieces]
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **ids, **fields)

    def _whole(
        self, choices: Sequence[ChoicePiece], scored: dict[int, PromptScored], fields: dict[str, Any]
    ) -> ChatCompletion:
        fields |= self._prompt_ids()
        if self.body.prompt_logprobs is not None:
            tokens = scored_prompt(self.request.prompts[0], scored[0].logprobs)
            fields["prompt_logprobs"] = prompt_logprobs(self.tokenizer, tokens, self.body.prompt_logprobs)
        messages = [self._message(piece) for piece in choices]
        return ChatCompletion(object="chat.completion", choices=messages, **fields)

    def _delta(self, piece: ChoicePiece) -> ChatChunkChoice:
        joined = join_parts(piece.parts)
        fields = _reasoning_fields(joined)
        if self._begins(piece):
            fields |= {"role": "assistant", "content": joined.content}
        elif joined.text:
            fields["content"] = joined.text
        if joined.calls:
            fields["tool_calls"] = [_call_delta(call) for call in joined.calls]
        return ChatChunkChoice(index=piece.index, delta=ChatDelta(**fields), **self._details(piece))

    def _message(self, piece: ChoicePiece) -> ChatChoice:
        joined = join_parts(piece.parts)
        fields = _reasoning_fields(joined)
        if joined.calls:
            fields["tool_calls"] = [_call(call) for call in joined.calls]
        message = ChatMessage(role="assistant", content=joined.content, **fields)
        return ChatChoice(index=piece.index, message=message, **self._details(piece))

    def _details(self, piece: ChoicePiece) -> dict[str, Any]:
        """The fields of a choice other than its message or delta."""
        top = self.body.candidates.number or 0
        logprobs = chat_logprobs(self.tokenizer, piece.scored, top, self.tokens_as_ids) if piece.scored else None
        ids = {"token_ids": list(piece.token_ids)} if self.body.return_token_ids else {}
        repaired = repaired_fields(self.splitters[piece.index]) if piece.finish_reason else {}
        return {"logprobs": logprobs, **ending(piece), **self._called(piece), **repaired, **ids}

    def _called(self, piece: ChoicePiece) -> dict[str, str]:
        """The finish reason `tool_calls` if the choice called tools. If the request named the function, the reason
        stays `stop`, as OpenAI's does."""
        named = isinstance(self.body.tool_choice, NamedTool)
        called = self.splitters[piece.index].called and piece.finish_reason is FinishReason.STOP
        return {"finish_reason": "tool_calls"} if called and not named else {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.request.prompts[0])} if self.body.return_token_ids else {}


def _reasoning_fields(joined: JoinedParts) -> dict[str, Any]:
    """The reasoning under both of its names."""
    return {"reasoning_content": joined.reasoning, "reasoning": joined.reasoning} if joined.reasoning else {}


def _call(part: CallPart) -> Call:
    assert part.call_id is not None
    return Call(id=part.call_id, type="function", function=CalledFunction(name=part.name, arguments=part.arguments))


def _call_delta(part: CallPart) -> CallDelta:
    if part.call_id is None:
        return CallDelta(index=part.position, function=CalledFunction(arguments=part.arguments))
    return CallDelta(index=part.position, **_call(part).model_dump())
