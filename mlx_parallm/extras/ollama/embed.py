"""`POST /api/embed` and `/api/embeddings`: Ollama's API for vectors of texts, on top of `/v1/embeddings`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core.requests import Event, RequestFinished
from mlx_parallm.errors import ContextLengthError
from mlx_parallm.extras.ollama.models import known_name, load
from mlx_parallm.extras.ollama.objects import EmbedAnswer, OneEmbeddingAnswer
from mlx_parallm.extras.ollama.schema import EmbedBody, OneEmbeddingBody, ollama_body
from mlx_parallm.extras.ollama.writer import durations
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import served_by
from mlx_parallm.server.api.embeddings import EmbeddingsBody, EmbeddingsWriter, plan_embeddings
from mlx_parallm.server.body import validated
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import generating
from mlx_parallm.server.request import RequestContext
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

router = Router(tags=["Ollama"])


@router.post(
    "/api/embed",
    role=Role.INFERENCE,
    responses=generating(EmbedAnswer),
    examples={"two texts": {"model": "base", "input": ["A cat sleeps.", "A dog runs."]}},
)
async def embed(
    body: Annotated[EmbedBody, Depends(ollama_body(EmbedBody))], request: Request, services: ServicesDep
) -> Response:
    """Makes a vector of each text, as `/v1/embeddings` does. Without texts, it loads the model."""
    if not body.input:
        answer = EmbedAnswer(model=await load(body.model, services), embeddings=[])
        return Response(answer.json_text(), media_type="application/json")
    return await _embedded(body, EmbedWriter, request, services)


@router.post(
    "/api/embeddings",
    role=Role.INFERENCE,
    responses=generating(OneEmbeddingAnswer),
    examples={"a text": {"model": "base", "prompt": "A cat sleeps."}},
)
async def embed_one(
    body: Annotated[OneEmbeddingBody, Depends(ollama_body(OneEmbeddingBody))], request: Request, services: ServicesDep
) -> Response:
    """The older form of `/api/embed`: makes a vector of one text, and does not bring it to length 1."""
    if not body.prompt:
        await load(body.model, services)
        return Response(OneEmbeddingAnswer(embedding=[]).json_text(), media_type="application/json")
    return await _embedded(body, OneEmbeddingWriter, request, services)


async def _embedded(
    body: EmbedBody | OneEmbeddingBody, writer: type[EmbeddingsWriter], request: Request, services: Services
) -> Response:
    fields = {**body.for_embeddings(), "model": known_name(body.model, services)}
    asked = await services.workers.run(request.state.body_bytes, partial(validated, EmbeddingsBody, fields))
    return GenerationResponse(services, asked, len(asked.input), partial(prepare, asked, writer))


def prepare(asked: EmbeddingsBody, writer: type[EmbeddingsWriter], context: RequestContext) -> EmbeddingsWriter:
    """Tokenises the texts, and makes the engine's request. Runs in a worker thread."""
    try:
        request = plan_embeddings(asked, context)
    except ContextLengthError:
        raise ContextLengthError(
            f"A text is longer than the model's context of {context.model.card.context_length} tokens: shorten it, or "
            "leave truncate out.",
            param="input",
        ) from None
    return writer(body=asked, request=request)


class EmbedWriter(EmbeddingsWriter):
    """Writes the vectors in Ollama's form."""

    def whole(self, events: Sequence[Event]) -> EmbedAnswer:
        finished = events[-1]
        assert isinstance(finished, RequestFinished)
        return EmbedAnswer(
            model=served_by(self.request)["model"],
            embeddings=self.vectors(events),
            prompt_eval_count=finished.prompt_tokens,
            **durations(finished),
        )


class OneEmbeddingWriter(EmbeddingsWriter):
    """Writes the vector in the form of Ollama's older route."""

    def whole(self, events: Sequence[Event]) -> OneEmbeddingAnswer:
        return OneEmbeddingAnswer(embedding=self.vectors(events)[0].tolist())
