"""Text to ids and back, for clients that have no tokenizer of their own."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends

from mlx_parallm.core import TextTokenizer
from mlx_parallm.errors import UnknownModelError
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.conversation import rendered
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.planning import check_ids
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.misc import DetokenizeBody, Detokenized, TokenizeBody, TokenizerInfo, Tokens

router = APIRouter()


@router.post("/tokenize", responses=raises(UnknownModelError), openapi_extra=request_body(TokenizeBody))
async def tokenize(body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody))], services: ServicesDep) -> Tokens:
    """The ids of a text, or of messages rendered with the chat template."""
    services.check_model(body.model)
    ids = await to_thread.run_sync(_ids, body, services.tokenizer)
    return Tokens(tokens=ids, count=len(ids), max_model_len=services.card.context_length)


@router.post("/detokenize", responses=raises(UnknownModelError), openapi_extra=request_body(DetokenizeBody))
async def detokenize(
    body: Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody))], services: ServicesDep
) -> Detokenized:
    """The text of ids, special tokens spelled out."""
    services.check_model(body.model)
    if body.tokens:
        check_ids(body.tokens, services.card.vocab_size, param="tokens")
    return Detokenized(prompt=await to_thread.run_sync(services.tokenizer.decode, body.tokens))


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


def _ids(body: TokenizeBody, tokenizer: TextTokenizer) -> list[int]:
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", body.add_special_tokens)
    messages = [message.for_template() for message in body.messages]
    return rendered(messages, (), tokenizer, body.add_generation_prompt, body.chat_template_kwargs.variables())
