"""Text to ids and back, for clients that have no tokenizer of their own."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core import TextTokenizer
from mlx_parallm.errors import ContextLengthError, UnknownModelError
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.conversation import rendered
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.planning import check_ids
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.wire.base import WireOutput
from mlx_parallm.server.wire.misc import DetokenizeBody, Detokenized, TokenizeBody, TokenizerInfo, Tokens

router = APIRouter()


@router.post(
    "/tokenize", response_model=Tokens, responses=raises(UnknownModelError), openapi_extra=request_body(TokenizeBody)
)
async def tokenize(
    body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody))], request: Request, services: ServicesDep
) -> Response:
    """The ids of a text, or of messages rendered with the chat template; 400 for a text too long for the context."""
    services.check_model(body.model)
    return await services.workers.run(request.state.body_bytes, partial(_tokenized, body, services))


@router.post(
    "/detokenize",
    response_model=Detokenized,
    responses=raises(UnknownModelError),
    openapi_extra=request_body(DetokenizeBody),
)
async def detokenize(
    body: Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody))], request: Request, services: ServicesDep
) -> Response:
    """The text of ids, special tokens spelled out; 400 for more ids than the context holds."""
    services.check_model(body.model)
    return await services.workers.run(request.state.body_bytes, partial(_detokenized, body, services))


@router.get("/tokenizer_info")
async def tokenizer_info(services: ServicesDep) -> TokenizerInfo:
    """The special tokens and the chat template."""
    tokenizer = services.tokenizer
    return TokenizerInfo(
        eos_token=tokenizer.eos_token,
        bos_token=tokenizer.bos_token,
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        vocab_size=tokenizer.vocab_size,
        chat_template=tokenizer.chat_template,
    )


def _tokenized(body: TokenizeBody, services: Services) -> Response:
    """Runs in a worker thread, as the text and its ids may be long."""
    ids = _ids(body, services.tokenizer, services.card.context_length)
    return _json(Tokens(tokens=ids, count=len(ids), max_model_len=services.card.context_length))


def _detokenized(body: DetokenizeBody, services: Services) -> Response:
    context = services.card.context_length
    if len(body.tokens) > context:
        raise ContextLengthError(
            f"{len(body.tokens)} token ids; the model's context is {context} tokens. Send fewer at a time.",
            param="tokens",
        )
    if body.tokens:
        check_ids(body.tokens, services.card.vocab_size, param="tokens")
    return _json(Detokenized(prompt=services.tokenizer.decode(body.tokens)))


def _ids(body: TokenizeBody, tokenizer: TextTokenizer, context: int) -> list[int]:
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", body.add_special_tokens, context)
    messages = [message.for_template() for message in body.messages]
    variables = body.chat_template_kwargs.variables()
    return rendered(messages, (), tokenizer, body.add_generation_prompt, variables, context)


def _json(answer: WireOutput) -> Response:
    return Response(answer.json_text(), media_type="application/json")
