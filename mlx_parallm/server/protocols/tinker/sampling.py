"""Sampling with the Tinker API."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request

from mlx_parallm.server.access.accounts import Account
from mlx_parallm.server.access.permits import as_of
from mlx_parallm.server.http.request_log import record_of
from mlx_parallm.server.protocols.tinker.bodies import Read, json_of
from mlx_parallm.server.protocols.tinker.dependencies import TinkerDep, check_base
from mlx_parallm.server.protocols.tinker.draws import draw, generation_request
from mlx_parallm.server.protocols.tinker.schema import SampleBody, SamplingSessionBody
from mlx_parallm.server.protocols.tinker.server import TinkerServer
from mlx_parallm.server.protocols.tinker.sessions import Sampler, SavedWeights, new_id
from mlx_parallm.server.services import Services, ServicesDep

router = APIRouter(prefix="/api/v1", include_in_schema=False)


@router.post("/create_sampling_session")
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


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, services: ServicesDep, tinker: TinkerDep) -> dict[str, Any]:
    found = tinker.sessions.sampler(sampler_id, tinker.key)
    path = None if found.saved is None else found.saved.path
    return {"sampler_id": sampler_id, "base_model": services.first.card.name, "model_path": path}


@router.post("/asample")
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
        opened.enter_context(services.gate.reserve(services.check_sequences(1, body.num_samples), account.queue_name))
        version = opened.enter_context(services.adapters.lease(tinker.selector_of(sampler)))
        request = as_of(account.key, generation_request(body, services.first.card, version))
        owner = sampler.sampler_id.partition(":")[0]
        work = draw(services, request, body, account)
        tinker.futures.start(request_id, owner, read.digest, read.nbytes, work, held=opened.pop_all())


def _sampler(body: SampleBody, services: Services, tinker: TinkerServer) -> Sampler:
    """What the request draws from: a sampling session, or what it names itself."""
    if body.sampling_session_id is not None:
        return tinker.sessions.sampler(body.sampling_session_id, tinker.key)
    if body.model_path is not None:
        return Sampler("", saved=SavedWeights.of(body.model_path, tinker.key))
    check_base(services, body.base_model)
    return Sampler("")
