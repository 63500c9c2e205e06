"""`POST /v1/score` and `/v1/rerank`, in vLLM's form: scores of pairs of texts, and documents in the order of theirs."""

from __future__ import annotations

import time
from typing import Annotated, ClassVar, Literal, Self

from fastapi import APIRouter, Depends
from pydantic import Field, PlainValidator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import TrainingDisabledError
from mlx_parallm.server.api.answer import Usage
from mlx_parallm.server.api.fields import INT32_MAX, WireInput, WireOutput, refused
from mlx_parallm.server.api.pooling.fields import MAX_INPUTS
from mlx_parallm.server.api.pooling.pairs import Pair, PairsBody, Scored, Text, Texts, scored_response
from mlx_parallm.server.http.body import json_body
from mlx_parallm.server.openapi.responses import generating
from mlx_parallm.server.services import ServicesDep

router = APIRouter()

# ---- scores ----------------------------------------------------------------------------------------


def _texts(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise refused("must be a text or a list of texts; none may be empty")
    if not 0 < len(texts) <= MAX_INPUTS:
        raise refused(f"must have 1 to {MAX_INPUTS} texts")
    return texts


OneOrMore = Annotated[list[str], PlainValidator(_texts, json_schema_input_type=Text | Texts)]


class ScoreBody(PairsBody):
    """Pairs of texts."""

    CONTEXT: ClassVar[str] = "text_1"
    SCORED: ClassVar[str] = "text_2"

    text_1: OneOrMore
    """What the scored texts follow: one text for all of them, or one for each. For a reward model, the question."""
    text_2: OneOrMore
    """The texts that are scored: 1 to 2,048. For a reward model, answers."""

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise refused(f"must be one text, or as many as text_2 has, which are {len(self.text_2)}", "text_1")
        return self

    @property
    def pairs(self) -> list[Pair]:
        first = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return [Pair(*texts) for texts in zip(first, self.text_2, strict=True)]

    @property
    def judged(self) -> list[Pair]:
        return self.pairs

    def answer(self, scored: Scored) -> Scores:
        data = [
            ScoreObject(object="score", index=index, score=score, tokens=tokens)
            for index, (score, tokens) in enumerate(zip(scored.scores, scored.tokens, strict=True))
        ]
        return Scores(object="list", created=int(time.time()), data=data, **scored.fields)


class ScoreObject(WireOutput):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    """The pair's place."""
    score: float
    """The mean log-likelihood of a token of `text_2`, in nats; or what the reward model gives."""
    tokens: int
    """Tokens of `text_2`. `score` times this is the log-likelihood of the whole text."""


class Scores(WireOutput):
    """The scores of all pairs, in their order."""

    id: str
    """The request's id, which is also in the header x-request-id."""
    object: Literal["list"]
    created: int
    """Unix time in seconds."""
    model: str
    """The served model, the adapter's name, or the reward model."""
    data: list[ScoreObject]
    """One score for each pair."""
    usage: Usage
    """Numbers of tokens. None is generated."""
    lora_adapter: str | None = None
    """`name@version` of the adapter; absent for the base."""


Scoring = Annotated[ScoreBody, Depends(json_body(ScoreBody))]


@router.post("/v1/score", responses=generating(Scores, TrainingDisabledError))
async def create_scores(body: Scoring, request: Request, services: ServicesDep) -> Response:
    """Scores pairs of texts: how likely the second is after the first, by the mean logprob of its tokens. With
    `model: "reward_model:NAME"`, what that reward model gives the second as an answer to the first."""
    return await scored_response(body, services, request)


@router.post("/score", responses=generating(Scores, TrainingDisabledError))
async def create_scores_too(body: Scoring, request: Request, services: ServicesDep) -> Response:
    """The same as `/v1/score`."""
    return await scored_response(body, services, request)


# ---- rankings --------------------------------------------------------------------------------------


class DocumentText(WireInput):
    """A document as an object."""

    text: Text
    """Its text."""


class RerankBody(PairsBody):
    """A query, and the documents to rank."""

    CONTEXT: ClassVar[str] = "documents"
    SCORED: ClassVar[str] = "query"

    query: Text
    """What is looked for."""
    documents: Annotated[list[Text | DocumentText], Field(min_length=1, max_length=MAX_INPUTS)]
    """1 to 2,048 texts, or objects with a `text`."""
    top_n: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """The number of documents to return, best first. 0: all of them."""
    return_documents: bool = True
    """Whether the answer repeats the documents' texts."""

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    @property
    def pairs(self) -> list[Pair]:
        return [Pair(f"Passage: {text}\nQuestion:", f" {self.query}") for text in self.texts]

    @property
    def judged(self) -> list[Pair]:
        return [Pair(self.query, text) for text in self.texts]

    def answer(self, scored: Scored) -> Ranking:
        texts = self.texts
        best = sorted(range(len(texts)), key=lambda index: -scored.scores[index])
        results = [
            RankedDocument(
                index=index,
                relevance_score=scored.scores[index],
                **({"document": DocumentOutput(text=texts[index])} if self.return_documents else {}),
            )
            for index in best[: self.top_n or None]
        ]
        return Ranking(results=results, **scored.fields)


class DocumentOutput(WireOutput):
    """A document."""

    text: str
    """Its text."""


class RankedDocument(WireOutput):
    """A document with its score."""

    index: int
    """The document's place in the request."""
    document: DocumentOutput | None = None
    """The document, unless `return_documents` is false."""
    relevance_score: float
    """The mean log-likelihood of a token of the query after the document, in nats; or what the reward model gives."""


class Ranking(WireOutput):
    """Documents, best first."""

    id: str
    """The request's id, which is also in the header x-request-id."""
    model: str
    """The served model, the adapter's name, or the reward model."""
    usage: Usage
    """Numbers of tokens. None is generated."""
    results: list[RankedDocument]
    """The documents, best first. Those with equal scores are in the order of the request."""
    lora_adapter: str | None = None
    """`name@version` of the adapter; absent for the base."""


Reranking = Annotated[RerankBody, Depends(json_body(RerankBody))]


@router.post("/v1/rerank", responses=generating(Ranking, TrainingDisabledError))
async def rerank(body: Reranking, request: Request, services: ServicesDep) -> Response:
    """Ranks documents by how likely the query is after each of them. With `model: "reward_model:NAME"`, by what that
    reward model gives each as an answer to the query."""
    return await scored_response(body, services, request)


@router.post("/rerank", responses=generating(Ranking, TrainingDisabledError))
async def rerank_too(body: Reranking, request: Request, services: ServicesDep) -> Response:
    """The same as `/v1/rerank`."""
    return await scored_response(body, services, request)
