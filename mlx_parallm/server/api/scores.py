"""`POST /v1/score` and `/v1/rerank`, in vLLM's form: scores of pairs of texts, and documents in the order of theirs. A
score is how likely the model finds the second text after the first, or what a reward model gives it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from fastapi import Depends
from pydantic import Field, PlainValidator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.requests import Event, PromptScored, RequestFinished
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.answer import AnswerWriter, Usage, token_usage, usage_of
from mlx_parallm.server.api.bodies import MAX_INPUTS, MAX_SEQUENCES, PoolingBody, together
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, WireInput, WireOutput, refused
from mlx_parallm.server.body import json_body
from mlx_parallm.server.generation import GenerationResponse
from mlx_parallm.server.openapi import generating
from mlx_parallm.server.request import RequestContext, check_ids, check_permitted, reading_request
from mlx_parallm.server.request_log import new_request_id, record_of
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.streams import while_connected

if TYPE_CHECKING:
    from mlx_parallm.extras.reward_models.trainer import RewardModelTrainer

REWARD_MODEL = "reward_model:"

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]


class Pair(NamedTuple):
    """Two texts: the likelihood of `scored` after `context` is the score."""

    context: str
    scored: str


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of all pairs, in their order, and the fields that every answer has. `tokens`: how many tokens of each
    pair were scored."""

    scores: Sequence[float]
    tokens: Sequence[int]
    fields: dict[str, Any]


class PairsBody(PoolingBody):
    """A body whose texts make pairs."""

    NEUTRAL: ClassVar[Neutral] = {"activation": (False,), "use_activation": (False,), "softmax": (False,)}
    CONTEXT: ClassVar[str]
    SCORED: ClassVar[str]
    """The names of the fields that have the texts of a pair."""

    @property
    @abstractmethod
    def pairs(self) -> list[Pair]:
        """All pairs, of which there is at least one."""

    @property
    @abstractmethod
    def judged(self) -> list[Pair]:
        """The same pairs for a reward model: a question, and an answer to it."""

    @abstractmethod
    def answer(self, scored: Scored) -> WireOutput:
        """The answer with these scores."""

    @property
    def reward_model(self) -> str | None:
        """The reward model that `model` names; None: the pairs are scored by likelihood."""
        name = self.model or ""
        return name.removeprefix(REWARD_MODEL) if name.startswith(REWARD_MODEL) else None


async def scored_response(body: PairsBody, services: Services, request: Request) -> Response:
    """The answer to a body, by likelihood or by a reward model."""
    pairs = body.pairs
    if body.reward_model is None:
        return GenerationResponse(services, body, len(pairs), partial(_prepare, body, pairs))
    scored = await _rewards(body, body.reward_model, services, request)
    return Response(body.answer(scored).json_text(), media_type="application/json")


# ---- by likelihood ---------------------------------------------------------------------------------


def _prepare(body: PairsBody, pairs: Sequence[Pair], context: RequestContext) -> PairsWriter:
    """Tokenises the pairs, and makes the engine's request. Runs in a worker thread."""
    model, lengths = context.model, list[int]()

    def joined() -> Iterator[Sequence[int]]:
        for context, scored in (_tokens(body, pair, model) for pair in pairs):
            lengths.append(len(scored))
            yield (*context, *scored)

    prompts = together(joined(), model.card.context_length, body.CONTEXT)
    scored_from = min(len(prompt) - scored for prompt, scored in zip(prompts, lengths, strict=True))
    request = reading_request(context, new_request_id("score"), body, prompts, scored_from=scored_from)
    return PairsWriter(body=body, request=request, scored=lengths)


def _tokens(body: PairsBody, pair: Pair, model: ServedModel) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of a pair. If both are longer than they may be, the end of the context's text is what is lost.

    Raises:
        ContextLengthError: they are longer than the model's context and are not to be cut, or what is scored alone is.
        InvalidRequestError: one of them has no tokens.
    """
    limit, most = model.card.context_length, body.most_tokens(model.card.context_length)
    context = model.tokenizer.encode(pair.context, True, limit if most is None else None)
    scored = model.tokenizer.encode(pair.scored, False, limit)
    check_ids(context, model.card.vocab_size, body.CONTEXT)
    check_ids(scored, model.card.vocab_size, body.SCORED)
    room = (limit if most is None else most) - len(scored)
    if room < 1 or (most is None and room < len(context)):
        raise ContextLengthError(
            f"A pair has {len(context)} and {len(scored)} tokens, and there is room for {room + len(scored)}: shorten "
            f"them. With truncate_prompt_tokens, {body.CONTEXT} is cut, and {body.SCORED} is not.",
            param=body.SCORED if room < 1 else body.CONTEXT,
        )
    return context[:room], scored


@dataclass(kw_only=True, eq=False)
class PairsWriter(AnswerWriter):
    """Writes scores: the mean logprob of the tokens that are scored. `scored`: how many they are, in each pair."""

    body: PairsBody
    scored: Sequence[int]

    def whole(self, events: Sequence[Event]) -> WireOutput:
        finished = events[-1]
        assert isinstance(finished, RequestFinished)
        prompts = {event.prompt_index: event.logprobs for event in events if isinstance(event, PromptScored)}
        scores = []
        for index, tokens in enumerate(self.scored):
            logprobs = [token.logprob for token in prompts[index][-tokens:] if token is not None]
            scores.append(sum(logprobs) / tokens)
        return self.body.answer(Scored(scores, self.scored, {**self.identity, "usage": usage_of(finished)}))


# ---- by a reward model -----------------------------------------------------------------------------


async def _rewards(body: PairsBody, name: str, services: Services, request: Request) -> Scored:
    """What the reward model of this name gives each pair."""
    if body.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens: not with a reward model, which judges whole answers; leave it out"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    record, key = record_of(request.scope), services.key
    check_permitted(key, body)
    record.set_model(body.model or name)
    services.check_open()
    models: RewardModelTrainer = services.require_extra("reward_models")
    request_id = new_request_id("score")
    if not key.sees(name):
        raise models.unknown(name)
    account = record.account = services.accounts.of(key)
    with account.request(), services.gate.reserve(min(len(body.judged), MAX_SEQUENCES), account.queue_name):
        read = partial(_rows, body, services.models.first)
        rows, lengths = await services.workers.run(request.state.body_bytes, read)
        tokens = sum(map(len, rows))
        account.add_prompt(tokens)
        async with while_connected(request.receive, services.lifecycle.expired):
            parts = (rows[at : at + MAX_SEQUENCES] for at in range(0, len(rows), MAX_SEQUENCES))
            rewards = [reward for part in parts for reward in await models.score(name, part)]
    usage = token_usage(tokens, 0)
    fields = {"id": request_id, "usage": usage, "model": body.model}
    return Scored(rewards, lengths, fields)


def _rows(body: PairsBody, model: ServedModel) -> tuple[Sequence[tuple[int, ...]], Sequence[int]]:
    """The tokens of each question, as a message of the user, and of its answer; and those of the answers, counted. Runs
    in a worker thread."""
    context, lengths = model.card.context_length, list[int]()

    def joined() -> Iterator[Sequence[int]]:
        for question, answer in body.judged:
            asked = model.tokenizer.apply_chat_template([{"role": "user", "content": question}], at_most=context)
            answered = model.tokenizer.encode(answer, False, context)
            if len(asked) + len(answered) >= context:
                raise ContextLengthError(
                    f"A pair has {len(asked) + len(answered)} tokens, and the model's context {context}; shorten it.",
                    param=body.CONTEXT,
                )
            lengths.append(len(answered))
            yield (*asked, *answered)

    return together(joined(), context, body.CONTEXT), lengths


router = Router()

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


@router.post(
    "/v1/score",
    "/score",
    role=Role.INFERENCE,
    responses=generating(Scores),
    examples={"two endings": {"text_1": "The sky is", "text_2": [" blue.", " loud."]}},
)
async def create_scores(body: Scoring, request: Request, services: ServicesDep) -> Response:
    """Scores pairs of texts: how likely the second is after the first, by the mean logprob of its tokens. With
    `model: "reward_model:NAME"`, what that reward model gives the second as an answer to the first."""
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


@router.post(
    "/v1/rerank",
    "/rerank",
    role=Role.INFERENCE,
    responses=generating(Ranking),
    examples={"the best of two": {"query": "Is it wet?", "documents": ["It rains.", "It snows."], "top_n": 1}},
)
async def rerank(body: Reranking, request: Request, services: ServicesDep) -> Response:
    """Ranks documents by how likely the query is after each of them. With `model: "reward_model:NAME"`, by what that
    reward model gives each as an answer to the query."""
    return await scored_response(body, services, request)
