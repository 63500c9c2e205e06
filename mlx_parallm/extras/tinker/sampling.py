"""Sampling with the Tinker API: one request to the engine for each `asample`.

The logprobs are those of the model itself at temperature 1, which the losses read too.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.requests import GenerationRequest, SamplingParams, StopParams, WorkClass
from mlx_parallm.errors import ContextLengthError, EngineError
from mlx_parallm.extras.tinker.answers import SampleAnswer, TinkerSequence, TopLogprobs
from mlx_parallm.extras.tinker.bodies import Read, json_of
from mlx_parallm.extras.tinker.dependencies import TinkerDep, check_base
from mlx_parallm.extras.tinker.schema import SampleBody, SamplingSessionBody
from mlx_parallm.extras.tinker.server import TinkerServer
from mlx_parallm.extras.tinker.sessions import Sampler, SavedWeights, new_id
from mlx_parallm.server.access import NamedKey, Role
from mlx_parallm.server.api.answer import whole_answer
from mlx_parallm.server.generation import generate
from mlx_parallm.server.limits import Account
from mlx_parallm.server.request import SEED_SPACE, check_ids
from mlx_parallm.server.request_log import new_request_id, record_of
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep


def sample_request(body: SampleBody, card: ModelCard, adapter: AdapterRef, key: NamedKey) -> GenerationRequest:
    """The engine's request.

    Raises:
        InvalidRequestError: the prompt is empty, or one of its ids is not in the vocabulary.
        ContextLengthError: the prompt and the tokens to sample do not fit the context.
    """
    prompt, params = body.prompt.ids(), body.sampling_params
    check_ids(prompt, card.vocab_size)
    room = card.context_length - len(prompt)
    wanted = room if params.max_tokens is None else params.max_tokens
    if wanted > room or room < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {card.context_length} tokens, and the request needs "
            f"{len(prompt) + max(wanted, 1)}: shorten the prompt or ask for fewer tokens.",
            param="max_tokens",
        )
    return GenerationRequest(
        request_id=new_request_id("tinker"),
        prompts=(prompt,),
        sampling=SamplingParams(
            temperature=params.temperature,
            top_k=max(0, min(params.top_k, card.vocab_size)),
            top_p=params.top_p,
            seed=secrets.randbits(64) if params.seed is None else params.seed % SEED_SPACE,
            top_logprobs=body.topk_sample_logprobs,
        ),
        stopping=_stopping(wanted, params.stop),
        n=body.num_samples,
        prompt_logprobs=body.topk_prompt_logprobs if body.prompt_logprobs or body.topk_prompt_logprobs else None,
        scored_from=max(0, len(prompt) - (body.prompt_logprobs_last_n or len(prompt))),
        adapter=adapter,
        work_class=WorkClass.TRAINING,
        cache_salt=key.salt(""),
        key=key.name,
        base=card.name,
    )


def _stopping(max_tokens: int, stop: str | Sequence[str] | Sequence[int] | None) -> StopParams:
    """An empty list ends nothing early. Texts and token ids are in addition to the model's own end of a text."""
    if stop is None:
        return StopParams(max_tokens)
    stops = [stop] if isinstance(stop, str) else list(stop)
    texts = tuple(each for each in stops if isinstance(each, str))
    ids = tuple(each for each in stops if isinstance(each, int))
    return StopParams(max_tokens, stop=texts, ignore_eos=not stops, stop_token_ids=ids)


async def draw(services: Services, request: GenerationRequest, body: SampleBody, account: Account) -> SampleAnswer:
    """Samples the sequences of a request, which `body` asks for, and counts them in the `account` of their key.

    Raises:
        EngineError: the engine failed the request.
    """
    events = [event async for event in generate(services, request, account)]
    whole, sequences = whole_answer(request, events), []
    for choice in whole.choices:
        if choice.finish_reason is None:
            raise EngineError("the engine ended a request without a finish reason")
        top = tuple(each.top for each in choice.logprobs) if request.sampling.top_logprobs else ()
        logprobs = tuple(each.logprob for each in choice.logprobs)
        sequences.append(TinkerSequence(choice.token_ids, logprobs, choice.finish_reason, top))
    prompt = whole.scored[0].logprobs if whole.scored else ()
    best: tuple[TopLogprobs | None, ...] | None = None
    if request.prompt_logprobs:
        best = tuple(None if each is None else each.top for each in prompt)
    of_prompt = tuple(None if each is None else each.logprob for each in prompt) if body.prompt_logprobs else None
    return SampleAnswer(tuple(sequences), of_prompt, best, whole.finished.cached_tokens)


router = Router(prefix="/api/v1", include_in_schema=False)


@router.post("/create_sampling_session", role=Role.TRAIN)
async def create_sampling_session(
    read: Annotated[Read[SamplingSessionBody], Depends(json_of(SamplingSessionBody))],
    services: ServicesDep,
    tinker: TinkerDep,
) -> dict[str, Any]:
    body = read.body
    if body.model_path is None:
        check_base(services, body.base_model)
    sampler = tinker.add_sampler(body.session_id, body.sampling_session_seq_id, body.model_path)
    return {"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"}


@router.get("/samplers/{sampler_id}", role=Role.TRAIN)
async def get_sampler(sampler_id: str, services: ServicesDep, tinker: TinkerDep) -> dict[str, Any]:
    found = tinker.sessions.sampler(sampler_id, tinker.key)
    path = None if found.saved is None else found.saved.path
    return {"sampler_id": sampler_id, "base_model": services.models.first.card.name, "model_path": path}


@router.post("/asample", role=Role.TRAIN)
async def asample(
    read: Annotated[Read[SampleBody], Depends(json_of(SampleBody))],
    asked: Request,
    services: ServicesDep,
    tinker: TinkerDep,
) -> dict[str, Any]:
    """Begins to sample. The sequences take their places in the server's queue now: if it is full, the answer is 429,
    and the SDK tries again."""
    services.check_open()
    body = read.body
    sampler = _sampler(body, services, tinker)
    number = body.seq_id if sampler.sampler_id else None
    request_id = new_id(tinker.key) if number is None else f"{sampler.sampler_id}:{number}"
    if not tinker.futures.repeated(request_id, read.digest):
        record = record_of(asked.scope)
        record.account = services.accounts.of(tinker.key)
        _start(request_id, read, sampler, services, tinker, record.account)
    return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{at}" for at in range(body.num_samples)]}


def _start(
    request_id: str,
    read: Read[SampleBody],
    sampler: Sampler,
    services: Services,
    tinker: TinkerServer,
    account: Account,
) -> None:
    """Starts the operation. It holds its places and its version until it ends, however that happens."""
    body = read.body
    tinker.futures.check_room(tinker.key, read.nbytes)
    with ExitStack() as opened:
        opened.enter_context(account.request())
        opened.enter_context(services.gate.reserve(body.num_samples, account.queue_name))
        version = opened.enter_context(services.adapters.lease(tinker.selector_of(sampler)))
        request = sample_request(body, services.models.first.card, version, account.key)
        owner = sampler.sampler_id.partition(":")[0]
        work = draw(services, request, body, account)
        tinker.futures.start(request_id, owner, read.digest, read.nbytes, work, held=opened.pop_all())


def _sampler(body: SampleBody, services: Services, tinker: TinkerServer) -> Sampler:
    """What the request samples from: a sampling session, or what it names itself."""
    if body.sampling_session_id is not None:
        return tinker.sessions.sampler(body.sampling_session_id, tinker.key)
    if body.model_path is not None:
        return Sampler("", saved=SavedWeights.of(body.model_path, tinker.key))
    check_base(services, body.base_model)
    return Sampler("")
