"""Models and their tokenizer: `/v1/models`, `/tokenize`, `/detokenize`, `/tokenizer_info`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Path
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.adapters.cards import AdapterCard
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.models import BaseStatus, ModelState, ServedModel
from mlx_parallm.errors import ContextLengthError
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.conversation import Conversation, Messages, TemplateVariables, chosen_template
from mlx_parallm.server.api.fields import OpenBody, TokenIds, WireOutput, refused
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import check_ids
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

router = Router()


# -- models ----------------------------------------------------------------------------------------


class Model(WireOutput):
    """One name that `model` accepts."""

    id: str
    """The name."""
    object: Literal["model"]
    created: int
    """Unix time, seconds."""
    owned_by: str
    """Always `mlx_parallm`."""
    root: str
    """For an adapter, the folder that it was loaded from; its name for keys with the role `inference`. For the base
    model, its name."""
    parent: str | None
    """For an adapter, the base model's name."""
    max_model_len: int | None
    """Maximum number of tokens of prompt and answer together; null for a base model that was not loaded yet."""
    version: int | None = None
    """For an adapter, its version."""
    state: ModelState | None = None
    """For a base model, whether it is in memory. `idle`: its next request loads it. `leaving`: it is unloaded for
    another base model when its requests have ended. `failed`: it could not be loaded."""


class ModelList(WireOutput):
    """The names that `model` accepts."""

    object: Literal["list"]
    data: list[Model]
    """The first base model, the other ones, and then adapters."""


Name = Annotated[str, Path(description="A base model, `base`, an adapter, or `name@version`.")]


@router.get("/v1/models", role=Role.INFERENCE, response_model_exclude_unset=True)
async def list_models(services: ServicesDep) -> ModelList:
    """The names that `model` accepts: those of the first base model, one for each other base model, and one for the
    live version of each adapter."""
    first, *others = services.models.statuses()
    names = dict.fromkeys((*services.models.first.card.names, *sorted(services.models.first.names), BASE_ADAPTER.name))
    bases = [*(_base(name, first, services) for name in names), *(_base(one.name, one, services) for one in others)]
    bases = bases if services.sees_base else []
    live = [_adapter(card, services) for card in services.adapters.cards() if card.live]
    unread = [_unread(name, one, services) for one in others for name in one.adapters]
    return ModelList(object="list", data=[*bases, *live, *unread])


@router.get("/v1/models/{name:path}", role=Role.INFERENCE, response_model_exclude_unset=True)
async def get_model(name: Name, services: ServicesDep) -> Model:
    """One model or adapter version. The name may have a slash, as hub ids do."""
    statuses = services.models.statuses()
    if services.is_base(name):
        return _base(name, statuses[0], services)
    for status in statuses:
        if name == status.name and services.sees_base:
            return _base(name, status, services)
        if name in status.adapters:
            return _unread(name, status, services)
    return _adapter(services.find(name, "model"), services)


def _base(name: str, status: BaseStatus, services: Services) -> Model:
    return Model(
        id=name,
        object="model",
        created=services.started_at,
        owned_by="mlx_parallm",
        root=status.name,
        parent=None,
        max_model_len=status.card.context_length if status.card else None,
        state=status.state,
    )


def _unread(name: str, status: BaseStatus, services: Services) -> Model:
    """An adapter whose base model was not loaded yet."""
    return Model(
        id=name,
        object="model",
        created=services.started_at,
        owned_by="mlx_parallm",
        root=name,
        parent=status.name,
        max_model_len=None,
    )


def _context_of(base: str, services: Services) -> int | None:
    models = services.models
    card = next((status.card for status in models.statuses() if status.name == base), models.first.card)
    return card.context_length if card else None


def _adapter(card: AdapterCard, services: Services) -> Model:
    return Model(
        id=card.ref.name if card.live else str(card.ref),
        object="model",
        created=card.created,
        owned_by="mlx_parallm",
        root=services.path(card.root) or card.ref.name,
        parent=card.base or services.models.first.card.name,
        max_model_len=_context_of(card.base, services),
        version=card.ref.version,
    )


# -- tokenizer -------------------------------------------------------------------------------------


class TokenizeBody(OpenBody):
    """A text or a conversation to tokenise: exactly one of `prompt` and `messages`."""

    model: str | None = None
    """Must be a known name. Its base model tokenises; the adapters of a base model share one tokenizer."""
    prompt: str | None = None
    """The text."""
    messages: Messages | None = None
    """A conversation, rendered with the chat template."""
    add_special_tokens: bool = True
    """Whether the tokenizer may add special tokens to a text."""
    add_generation_prompt: bool = True
    """Whether a conversation ends with the start of the assistant's turn."""
    continue_final_message: bool = False
    """Whether a conversation ends with the text of its last message. It needs `add_generation_prompt` false."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """As in chat."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""
    return_token_strs: bool = False
    """Whether the answer has each token as the vocabulary writes it too."""

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise refused("send either prompt or messages", "prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise refused("needs add_generation_prompt: false", "continue_final_message")
        return self


class Tokens(WireOutput):
    """The token ids of a text or a conversation."""

    tokens: list[int]
    """The ids."""
    count: int
    """Number of ids."""
    max_model_len: int
    """Maximum number of tokens of prompt and answer together."""
    token_strs: list[str] | None = None
    """Each token as the vocabulary writes it, such as `Ġthe` for " the"; with `return_token_strs`."""


class DetokenizeBody(OpenBody):
    """Token ids to decode."""

    model: str | None = None
    """Must be a known name. Its base model tokenises; the adapters of a base model share one tokenizer."""
    tokens: TokenIds
    """Token ids, smaller than the size of the vocabulary."""


class Detokenized(WireOutput):
    """The text of token ids."""

    prompt: str
    """The text."""


class TokenizerInfo(WireOutput):
    """What a client needs to render the chat template itself."""

    eos_token: str | None
    """Text of the end-of-sequence token."""
    bos_token: str | None
    """Text of the beginning-of-sequence token."""
    eos_token_ids: list[int]
    """Ids that end an answer."""
    vocab_size: int
    """Size of the vocabulary. Token ids are smaller."""
    chat_template: str | None
    """The chat template, in Jinja."""


@router.post(
    "/tokenize",
    role=Role.INFERENCE,
    response_model=Tokens,
    examples={
        "a text": {"prompt": "Hello"},
        "a conversation": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    },
)
async def tokenize(
    body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody))], request: Request, services: ServicesDep
) -> Response:
    """The token ids of a text, or of messages rendered with the chat template; 400 for a text that is longer than the
    context."""
    services.check_model(body.model)
    async with services.model_for(body.model) as model:
        return await services.workers.run(request.state.body_bytes, partial(_tokenize, body, model))


@router.post("/detokenize", role=Role.INFERENCE, response_model=Detokenized, examples={"ids": {"tokens": [1, 2, 3]}})
async def detokenize(
    body: Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody))], request: Request, services: ServicesDep
) -> Response:
    """The text of token ids, special tokens included; 400 for more ids than the context holds."""
    services.check_model(body.model)
    async with services.model_for(body.model) as model:
        return await services.workers.run(request.state.body_bytes, partial(_detokenize, body, model))


@router.get("/tokenizer_info", role=Role.INFERENCE)
async def tokenizer_info(services: ServicesDep) -> TokenizerInfo:
    """The special tokens and the chat template."""
    tokenizer = services.models.first.tokenizer
    return TokenizerInfo(
        eos_token=tokenizer.eos_token,
        bos_token=tokenizer.bos_token,
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        vocab_size=tokenizer.vocab_size,
        chat_template=tokenizer.chat_template,
    )


def _tokenize(body: TokenizeBody, model: ServedModel) -> Response:
    """Runs in a worker thread, because the text may be long."""
    tokenizer, context = model.tokenizer, model.card.context_length
    if body.messages is None:
        ids = tokenizer.encode(body.prompt or "", body.add_special_tokens, context)
    else:
        template = chosen_template(body.chat_template, tokenizer.chat_template, model.templates)
        variables, open_ended = body.chat_template_kwargs, body.continue_final_message
        conversation = Conversation.of(body.messages, (), tokenizer, variables, template, open_ended)
        ids = conversation.render(tokenizer, body.add_generation_prompt, context)
    strings = {"token_strs": [tokenizer.token_string(token) for token in ids]} if body.return_token_strs else {}
    return _json(Tokens(tokens=ids, count=len(ids), max_model_len=context, **strings))


def _detokenize(body: DetokenizeBody, model: ServedModel) -> Response:
    """Runs in a worker thread."""
    context = model.card.context_length
    if len(body.tokens) > context:
        raise ContextLengthError(
            f"{len(body.tokens)} token ids; the model's context is {context} tokens. Send fewer at a time.",
            param="tokens",
        )
    if body.tokens:
        check_ids(body.tokens, model.card.vocab_size, param="tokens")
    return _json(Detokenized(prompt=model.tokenizer.decode(body.tokens)))


def _json(answer: WireOutput) -> Response:
    return Response(answer.json_text(), media_type="application/json")
