"""`/api/v1`: the Tinker API, which the `tinker` SDK speaks. Its sessions, models and training; `weights` and `sampling`
have the rest.

Source: the modules `tinker.resources` of the PyPI package `tinker`, 0.24.1 and 0.38.0.

Long operations answer at once with the id of a future, whose result `retrieve_future` gives. A server that does not
train answers 409. The routes are not in the OpenAPI document: the SDK defines them.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_parallm.extras.tinker import protobuf
from mlx_parallm.extras.tinker.answers import TinkerAnswer
from mlx_parallm.extras.tinker.bodies import (
    Read,
    is_protobuf,
    json_of,
    read_json,
    read_loss_request,
    skip_body,
)
from mlx_parallm.extras.tinker.dependencies import TinkerDep, check_base
from mlx_parallm.extras.tinker.losses import LossInput, loss_input
from mlx_parallm.extras.tinker.schema import (
    AdamBody,
    CreateModelBody,
    ForwardBackwardBody,
    ForwardBody,
    FutureBody,
    HeartbeatBody,
    LossBody,
    ModelBody,
    OptimStepBody,
    SessionBody,
)
from mlx_parallm.extras.tinker.server import TinkerServer
from mlx_parallm.extras.tinker.sessions import is_of
from mlx_parallm.server.access import Role
from mlx_parallm.server.body import validated
from mlx_parallm.server.limits import Account
from mlx_parallm.server.request_log import record_of
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

POLL_S = 25.0
"""How long `retrieve_future` waits for a result. The SDK gives up after 45 s."""
_BYTES_PER_NUMBER = 12

router = Router(prefix="/api/v1", include_in_schema=False)


# -- the server ------------------------------------------------------------------------------------


@router.get("/healthz", role=Role.TRAIN)
async def healthz(tinker: TinkerDep) -> dict[str, Any]:
    return {"status": "ok"}


@router.post("/client/config", "/client/dynamic_config", role=Role.TRAIN, dependencies=[Depends(skip_body)])
async def client_config() -> dict[str, Any]:
    """The SDK's own defaults for everything."""
    return {}


@router.post("/telemetry", role=Role.TRAIN, dependencies=[Depends(skip_body)])
async def telemetry() -> dict[str, Any]:
    """Nothing is kept."""
    return {"status": "accepted"}


@router.get("/get_server_capabilities", role=Role.TRAIN)
async def capabilities(services: ServicesDep, tinker: TinkerDep) -> dict[str, Any]:
    card = services.models.first.card
    models = [
        {"model_name": name, "max_context_length": card.context_length, "trainable": True, "sampleable": True}
        for name in card.names
    ]
    return {"supported_models": models}


# -- sessions --------------------------------------------------------------------------------------


@router.post("/create_session", role=Role.TRAIN)
async def create_session(
    body: Annotated[Read[SessionBody], Depends(json_of(SessionBody))],
    services: ServicesDep,
    tinker: TinkerDep,
) -> dict[str, Any]:
    services.check_open()
    answer = {"session_id": tinker.open_session().session_id, "type": "create_session"}
    if not tinker.policies.head_can_be_trained:
        answer["warning_message"] = (
            "The output head of this model cannot be trained here: train_unembed has no effect, and the attention and "
            "MLP layers are trained."
        )
    return answer


@router.post("/session_heartbeat", role=Role.TRAIN)
async def session_heartbeat(
    read: Annotated[Read[HeartbeatBody], Depends(json_of(HeartbeatBody))], tinker: TinkerDep
) -> dict[str, Any]:
    tinker.sessions.find(read.body.session_id, tinker.key)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", role=Role.TRAIN, dependencies=[Depends(skip_body)])
async def finish_session(session_id: str, tinker: TinkerDep) -> dict[str, Any]:
    """Another key's session is left alone, with the answer for one that has ended already."""
    if is_of(tinker.key, session_id):
        tinker.end_session(session_id)
    return {}


@router.get("/sessions/{session_id}", role=Role.TRAIN)
async def session(session_id: str, tinker: TinkerDep) -> dict[str, Any]:
    found = tinker.sessions.find(session_id, tinker.key)
    return {"training_run_ids": [*found.models], "sampler_ids": [*found.samplers]}


@router.get("/sessions", role=Role.ADMIN)
async def sessions(tinker: TinkerDep) -> dict[str, Any]:
    return {"sessions": [each.session_id for each in tinker.sessions.of(tinker.key)]}


# -- models ----------------------------------------------------------------------------------------


@router.post("/create_model", role=Role.TRAIN)
async def create_model(
    read: Annotated[Read[CreateModelBody], Depends(json_of(CreateModelBody))],
    services: ServicesDep,
    tinker: TinkerDep,
) -> dict[str, Any]:
    check_base(services, read.body.base_model)
    services.check_open()
    request_id, model_id = tinker.create_model(read.body, read.digest)
    return {"request_id": request_id, "model_id": model_id}


@router.post("/get_info", role=Role.TRAIN)
async def get_info(
    read: Annotated[Read[ModelBody], Depends(json_of(ModelBody))], services: ServicesDep, tinker: TinkerDep
) -> dict[str, Any]:
    model = tinker.sessions.model(read.body.model_id, tinker.key)
    name = services.models.first.card.name
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "model_data": {
            "arch": services.models.first.card.dtype,
            "model_name": name,
            "tokenizer_id": services.models.first.card.tokenizer or name,
        },
        "is_lora": True,
        "lora_rank": tinker.rank(model),
        "model_name": name,
    }


@router.post("/unload_model", role=Role.TRAIN)
async def unload_model(
    read: Annotated[Read[ModelBody], Depends(json_of(ModelBody))], tinker: TinkerDep
) -> dict[str, Any]:
    tinker.unload(read.body.model_id)
    return {"model_id": read.body.model_id, "type": "unload_model"}


# -- training --------------------------------------------------------------------------------------


@router.post("/forward_backward", role=Role.TRAIN)
async def forward_backward(request: Request, services: ServicesDep, tinker: TinkerDep) -> dict[str, Any]:
    """In JSON or protobuf, as the Content-Type header says. The protobuf message may ask for the forward pass alone."""
    services.check_open()
    if not is_protobuf(request):
        read = await read_json(ForwardBackwardBody, request, services)
        given = read.body.forward_backward_input
        return _score(tinker, services, read, given, _account(request, services), backward=True)
    message, digest, nbytes = await read_loss_request(request, services)
    reading = partial(services.workers.run, nbytes, message.input)
    backward = not message.forward_only
    account = _account(request, services)
    request_id = tinker.score(message.model_id, message.seq_id, reading, backward, digest, nbytes, account)
    return {"request_id": request_id, "model_id": message.model_id}


@router.post("/forward", role=Role.TRAIN)
async def forward(
    read: Annotated[Read[ForwardBody], Depends(json_of(ForwardBody))],
    request: Request,
    services: ServicesDep,
    tinker: TinkerDep,
) -> dict[str, Any]:
    services.check_open()
    return _score(tinker, services, read, read.body.forward_input, _account(request, services), backward=False)


def _account(request: Request, services: Services) -> Account:
    """The account of the request's key, of whose limits the answer has headers."""
    record = record_of(request.scope)
    record.account = services.accounts.of(services.key)
    return record.account


def _score(
    tinker: TinkerServer,
    services: Services,
    read: Read[ForwardBackwardBody] | Read[ForwardBody],
    given: dict[str, Any],
    account: Account,
    backward: bool,
) -> dict[str, Any]:
    def parse() -> LossInput:
        return loss_input(validated(LossBody, given))

    reading = partial(services.workers.run, read.nbytes, parse)
    model_id = read.body.model_id
    request_id = tinker.score(model_id, read.body.seq_id, reading, backward, read.digest, read.nbytes, account)
    return {"request_id": request_id, "model_id": model_id}


@router.post("/optim_step", role=Role.TRAIN)
async def optim_step(
    read: Annotated[Read[OptimStepBody], Depends(json_of(OptimStepBody))],
    services: ServicesDep,
    tinker: TinkerDep,
) -> dict[str, Any]:
    services.check_open()
    reading = partial(validated, AdamBody, read.body.adam_params)
    return {"request_id": tinker.step(read.body, read.digest, reading), "model_id": read.body.model_id}


# -- futures ---------------------------------------------------------------------------------------


@router.post("/retrieve_future", role=Role.TRAIN)
async def retrieve_future(
    read: Annotated[Read[FutureBody], Depends(json_of(FutureBody))],
    request: Request,
    services: ServicesDep,
    tinker: TinkerDep,
) -> Response:
    """Waits for a result, for a while. A client that gets `try_again` asks again at once."""
    request_id = read.body.request_id
    record = record_of(request.scope)
    record.waits = True
    answer = await tinker.result(request_id, POLL_S)
    record.waits = False
    if answer is None:
        return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"})
    as_protobuf = protobuf.MEDIA_TYPE in request.headers.get("accept", "")
    written = await services.workers.run(_BYTES_PER_NUMBER * answer.size, partial(_written, answer, as_protobuf))
    return Response(written[0], media_type=written[1])


def _written(answer: TinkerAnswer, as_protobuf: bool) -> tuple[bytes, str]:
    """The result's bytes and their media type. Call it in a worker thread."""
    message = answer.protobuf() if as_protobuf else None
    return (answer.json(), "application/json") if message is None else (message, protobuf.MEDIA_TYPE)


@router.post("/cancel_future", role=Role.TRAIN)
async def cancel_future(
    read: Annotated[Read[FutureBody], Depends(json_of(FutureBody))], tinker: TinkerDep
) -> dict[str, Any]:
    """Ends sampling early. Operations of a model keep their place in its order and are not cancelled."""
    tinker.cancel(read.body.request_id)
    return {}
