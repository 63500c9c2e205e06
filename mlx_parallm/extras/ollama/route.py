"""`POST /api/chat` and `/api/generate`: Ollama's API on top of chat and completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.splitter import AnswerSyntax, Splitter
from mlx_parallm.extras.ollama.models import known_name, load
from mlx_parallm.extras.ollama.objects import AnsweredMessage, ChatAnswer, GenerateAnswer, timestamp
from mlx_parallm.extras.ollama.options import PromptedBody
from mlx_parallm.extras.ollama.schema import OllamaChatBody, OllamaGenerateBody, RawCompletionBody, ollama_body
from mlx_parallm.extras.ollama.writer import GenerateWriter, OllamaChatWriter
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.chat import ChatBody, PlannedChat, plan_chat
from mlx_parallm.server.api.completions import plan_completion
from mlx_parallm.server.api.dialect import CONVERSATION, Dialect
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.body import validated
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import in_lines
from mlx_parallm.server.request import RequestContext
from mlx_parallm.server.request_log import new_request_id
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

NAMES: Mapping[str, str] = {
    r"response_format(\.json_schema\.schema)?": "format",
    "max_tokens": "options.num_predict",
}
"""See `Dialect.names`."""
CHAT = Dialect(ChatBody, {CONVERSATION: "messages", **NAMES})
GENERATE = Dialect(ChatBody, {CONVERSATION: "prompt", **NAMES})

router = Router(tags=["Ollama"])


# -- chat ------------------------------------------------------------------------------------------


@router.post(
    "/api/chat",
    role=Role.INFERENCE,
    responses=in_lines(ChatAnswer),
    examples={
        "a question": {
            "model": "base",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "options": {"num_predict": 8},
        },
        "in one piece": {
            "model": "base",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "stream": False,
            "options": {"num_predict": 8},
        },
        "load": {"model": "base"},
    },
)
async def chat(
    body: Annotated[OllamaChatBody, Depends(ollama_body(OllamaChatBody))],
    request: Request,
    services: ServicesDep,
) -> Response:
    """Continues a conversation, as Ollama does. Without messages, it loads the model."""
    fields = {**body.for_chat(), "model": known_name(body.model, services)}
    if body.is_empty:
        message = AnsweredMessage(role="assistant", content="")
        loaded = await _loaded(body, services)
        return _json(ChatAnswer(**loaded, message=message))
    asked = await services.workers.run(request.state.body_bytes, partial(CHAT.translated, fields))
    return GenerationResponse(services, asked, 1, partial(prepare_chat, asked, services))


@CHAT.own_names()
def prepare_chat(asked: ChatBody, services: Services, context: RequestContext) -> OllamaChatWriter:
    """Renders and tokenises the conversation, and builds the engine's request. Runs in a worker thread."""
    planned = plan_chat(new_request_id("ollama"), asked, services, context)
    return OllamaChatWriter(**_writer_fields(planned, context.model))


# -- generate --------------------------------------------------------------------------------------


@router.post(
    "/api/generate",
    role=Role.INFERENCE,
    responses=in_lines(GenerateAnswer),
    examples={
        "a question": {"model": "base", "prompt": "Hello", "options": {"num_predict": 8}},
        "continue a text": {"model": "base", "prompt": "Once", "raw": True, "stream": False},
    },
)
async def generate(
    body: Annotated[OllamaGenerateBody, Depends(ollama_body(OllamaGenerateBody))],
    request: Request,
    services: ServicesDep,
) -> Response:
    """Answers a prompt as the only message of a chat, or continues it as it is, with `raw` or if the model has no chat
    template. Without a prompt, it loads the model."""
    fields = {**body.for_chat(), "model": known_name(body.model, services)}
    if body.is_empty:
        return _json(GenerateAnswer(**await _loaded(body, services), response=""))
    asked = await services.workers.run(request.state.body_bytes, partial(GENERATE.translated, fields))
    return GenerationResponse(services, asked, 1, partial(prepare_generate, body, asked, services))


@GENERATE.own_names()
def prepare_generate(
    body: OllamaGenerateBody, asked: ChatBody, services: Services, context: RequestContext
) -> GenerateWriter:
    """Tokenises the prompt, and builds the engine's request. Runs in a worker thread.

    Args:
        asked: the prompt as a chat body.
    """
    request_id = new_request_id("ollama")
    if body.raw or context.model.tokenizer.chat_template is None:
        plain = validated(RawCompletionBody, body.for_completion())
        planned = PlannedChat(plan_completion(request_id, plain, context), AnswerSyntax())
    else:
        planned = plan_chat(request_id, asked, services, context)
    return GenerateWriter(**_writer_fields(planned, context.model))


# -- both ------------------------------------------------------------------------------------------


def _writer_fields(planned: PlannedChat, model: ServedModel) -> dict[str, Any]:
    return {
        "request": planned.request,
        "tokenizer": model.tokenizer,
        "splitter": Splitter(planned.syntax),
        "watch": planned.watch,
    }


async def _loaded(body: PromptedBody, services: Services) -> dict[str, Any]:
    """Loads the model of a request without a prompt, and returns the answer's fields. Nothing is unloaded."""
    return {
        "model": await load(body.model, services),
        "created_at": timestamp(time.time()),
        "done": True,
        "done_reason": "unload" if body.unloads else "load",
    }


def _json(answer: ChatAnswer | GenerateAnswer) -> Response:
    return Response(answer.json_text(), media_type="application/json")


def is_served(backend: Backend) -> bool:
    """Whether a server has the routes of Ollama's API."""
    return backend.config.ollama_api
