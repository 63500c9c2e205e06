"""`POST /v1/embeddings`: vectors of texts, from the hidden states of the served model or of an adapter."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
from fastapi import Depends
from numpy.typing import NDArray
from pydantic import Field, PlainValidator
from starlette.responses import Response

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.requests import Event, GenerationRequest, Pooling, RequestFinished, SequencePooled
from mlx_parallm.errors import ContextLengthError, EngineError, InvalidRequestError
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import AnswerWriter, Usage, usage_of
from mlx_parallm.server.api.bodies import MAX_INPUTS, PoolingBody, together
from mlx_parallm.server.api.completions import Prompt, Prompts, prompts_of
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, Numbers, WireOutput, refused
from mlx_parallm.server.body import json_body
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import generating
from mlx_parallm.server.request import RequestContext, check_ids, reading_request
from mlx_parallm.server.request_log import new_request_id
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

Vector = NDArray[np.float32]
PoolingName = Literal["last", "mean"]

# ---- the body and the answer ---------------------------------------------------------------------


def _inputs(value: object) -> list[Prompt]:
    inputs = prompts_of(value)
    if len(inputs) > MAX_INPUTS:
        raise refused(f"has {len(inputs)} texts; at most {MAX_INPUTS} fit one request")
    return inputs


class EmbeddingsBody(PoolingBody):
    """The texts, and the form of their vectors."""

    NEUTRAL: ClassVar[Neutral] = {"embed_dtype": ("float32",), "endianness": ("native", "little"), "messages": ()}

    input: Annotated[Prompts, PlainValidator(_inputs, json_schema_input_type=Prompts)]
    """A text, a list of token ids, or a list of at most 2,048 of either. Each gets one vector."""
    encoding_format: Literal["float", "base64"] = "float"
    """Whether a vector is a list of numbers, or the base64 text of its little-endian float32 values."""
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Only the first so many values of each vector, at length 1 again. The model was not trained for that, so it costs
    accuracy."""
    pooling: PoolingName | None = None
    """Which hidden states make the vector: that of the last token, or the mean over all tokens. If it is left out,
    `--embedding-pooling` decides."""
    normalize: bool = True
    """Whether the vector has length 1, so that the product of two vectors is the cosine of their angle."""
    use_activation: bool | None = None
    """vLLM's name of `normalize`. false in either of them turns it off."""
    truncation_side: Literal["left", "right"] = "right"
    """The side on which `truncate_prompt_tokens` cuts a text."""
    add_special_tokens: bool = True
    """Whether the tokenizer may add special tokens to a text. Token ids are used as they are."""

    @property
    def normalises(self) -> bool:
        return self.normalize and self.use_activation is not False


class EmbeddingObject(WireOutput):
    """The vector of one text."""

    LONG: ClassVar[bool] = True

    object: Literal["embedding"]
    index: int
    """The text's place in `input`."""
    embedding: Numbers | str
    """The vector: numbers, or base64 of little-endian float32."""


class Embeddings(WireOutput):
    """The vectors of all texts, in their order."""

    LONG: ClassVar[bool] = True

    id: str
    """The request's id, which is also in the header x-request-id."""
    object: Literal["list"]
    created: int
    """Unix time in seconds."""
    model: str
    """The served model, or the adapter's name."""
    data: list[EmbeddingObject]
    """One vector for each text."""
    usage: Usage
    """Numbers of tokens. None is generated."""
    lora_adapter: str | None = None
    """`name@version` of the adapter; absent for the base."""


# ---- the route -------------------------------------------------------------------------------------

router = Router()


@router.post(
    "/v1/embeddings",
    role=Role.INFERENCE,
    responses=generating(Embeddings),
    examples={
        "two texts": {"input": ["A cat sleeps.", "A dog runs."]},
        "token ids, as base64": {"input": [1, 2, 3], "encoding_format": "base64", "pooling": "mean", "dimensions": 2},
    },
)
async def create_embeddings(
    body: Annotated[EmbeddingsBody, Depends(json_body(EmbeddingsBody))], services: ServicesDep
) -> Response:
    """Makes a vector of each text. Texts that mean alike get vectors in similar directions, as far as a model can do
    that which was trained to continue texts."""
    return GenerationResponse(services, body, len(body.input), partial(prepare, body))


def prepare(body: EmbeddingsBody, context: RequestContext) -> EmbeddingsWriter:
    """Tokenises the texts, and makes the engine's request. Runs in a worker thread."""
    return EmbeddingsWriter(body=body, request=plan_embeddings(body, context))


def plan_embeddings(body: EmbeddingsBody, context: RequestContext) -> GenerationRequest:
    """Tokenises the texts, and makes the engine's request. Call it in a worker thread.

    Raises:
        ContextLengthError: a text is longer than the context, and is not to be cut.
        InvalidRequestError: one has no tokens, a token is not in the vocabulary, or there are too many together.
    """
    model = context.model
    prompts = together((_ids(body, text, model) for text in body.input), model.card.context_length, "input")
    pooling = Pooling(body.pooling or context.config.embedding_pooling)
    return reading_request(context, new_request_id("embd"), body, prompts, pooling=pooling)


def _ids(body: EmbeddingsBody, text: Prompt, model: ServedModel) -> Sequence[int]:
    """The tokens of one text, cut as the body says. Raises the errors of `plan_embeddings`."""
    context, ids = model.card.context_length, text
    most = body.most_tokens(context)
    if isinstance(ids, str):
        ids = model.tokenizer.encode(ids, body.add_special_tokens, context if most is None else None)
    check_ids(ids, model.card.vocab_size, "input")
    if most is not None:
        return ids[:most] if body.truncation_side == "right" else ids[-most:]
    if len(ids) > context:
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens, and a text has {len(ids)}: shorten it, or send "
            "truncate_prompt_tokens: -1.",
            param="input",
        )
    return ids


@dataclass(kw_only=True, eq=False)
class EmbeddingsWriter(AnswerWriter):
    """Writes the vectors."""

    body: EmbeddingsBody

    def whole(self, events: Sequence[Event]) -> WireOutput:
        finished = events[-1]
        assert isinstance(finished, RequestFinished)
        data = [self._object(index, vector) for index, vector in enumerate(self.vectors(events))]
        fields = {**self.identity, "usage": usage_of(finished)}
        return Embeddings(object="list", created=int(time.time()), data=data, **fields)

    def vectors(self, events: Sequence[Event]) -> list[Vector]:
        """The vectors of all texts, in their order."""
        pooled = sorted((e for e in events if isinstance(e, SequencePooled)), key=lambda event: event.index)
        return [finished_vector(event.vector, self.body.dimensions, self.body.normalises) for event in pooled]

    def _object(self, index: int, vector: Vector) -> EmbeddingObject:
        encoded = _base64(vector) if self.body.encoding_format == "base64" else vector
        return EmbeddingObject(object="embedding", index=index, embedding=encoded)


def finished_vector(pooled: bytes, dimensions: int | None, normalises: bool) -> Vector:
    """The vector of pooled hidden states: cut, and brought to length 1. That of zeros stays as it is.

    Raises:
        InvalidRequestError: it has fewer dimensions.
        EngineError: it has a value that is not finite.
    """
    vector = np.frombuffer(pooled, "<f4")
    if dimensions is not None and dimensions > len(vector):
        raise InvalidRequestError(f"{dimensions} is more than the model's {len(vector)}.", param="dimensions")
    vector = vector[:dimensions]
    if not np.isfinite(vector).all():
        raise EngineError("the model's hidden states are not finite")
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype("<f4") if normalises and length else vector


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
