"""`POST /v1/chat/completions`: the engine's request for a conversation, and the answer. With `/tokens`, the client
gives the tokens of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import Depends
from starlette.responses import Response

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.requests import Event, FinishReason, GenerationRequest, PromptScored
from mlx_parallm.core.splitter import AnswerSyntax, CallPart, JoinedParts, Splitter, join_parts
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import ChoicePiece, ChoiceWriter, Watch, ending, parts_of
from mlx_parallm.server.api.chat.history import PlannedTurn
from mlx_parallm.server.api.chat.messages import Conversation
from mlx_parallm.server.api.chat.schema import (
    Call,
    CallDelta,
    CalledFunction,
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChatTokensBody,
)
from mlx_parallm.server.api.chat.template import chosen_template
from mlx_parallm.server.api.chat.tools import NamedTool, answer_grammar, answer_syntax
from mlx_parallm.server.api.logprobs import chat_logprobs, prompt_logprobs, scored_prompt
from mlx_parallm.server.api.repairs import repaired_fields
from mlx_parallm.server.body import json_body
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import streamable
from mlx_parallm.server.request import RequestContext, generation_request, longest_text, tokens_as_ids
from mlx_parallm.server.request_log import new_request_id
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

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
