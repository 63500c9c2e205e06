"""Atropos' trajectory API, served in place of `run-api`. Routes, fields and answers are those of
`atroposlib.api.server` 0.4.0, as its environments use them.

environment ── POST /scored_data ─▶ journal ─▶ answer
                                        └────▶ the groups that wait for an update of the default adapter

Four things differ. This server is the trainer, so another one cannot register or take batches. Updates need no batches
of equal groups, so no group is held back until others fit it. Groups that wait are in the run's journal: /reset_data
forgets the environments and keeps them. Shares of a batch (`min_batch_allocation`) are refused, because groups are
trained in the order in which they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.errors import ConflictError, InvalidRequestError
from mlx_parallm.extras.atropos.environments import Environments
from mlx_parallm.extras.atropos.groups import AtroposGroups
from mlx_parallm.extras.atropos.queue import GroupQueue, SentGroup
from mlx_parallm.extras.atropos.schema import EnvIdentifier, RegisterEnv, ScoredDataList
from mlx_parallm.extras.atropos.scored_data import ScoredData, TokenLimits
from mlx_parallm.extras.atropos.source import SOURCE
from mlx_parallm.extras.atropos.trajectory_api import Registration
from mlx_parallm.server.access import NamedKey, Role
from mlx_parallm.server.api.root import page_for
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.body import json_body
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.rl.service import TrainingService

UNREGISTERED = f"{SOURCE}:unregistered"
"""The source of groups without the id of an environment that this server knows."""

router = Router(tags=["Atropos"])


@dataclass(frozen=True, slots=True)
class AtroposParts:
    """What the routes need besides `Services`, which has it among the extras. `trainer`: how it describes itself."""

    trainer: Registration
    training: TrainingService
    groups: AtroposGroups
    limits: TokenLimits
    environments: Environments
    queue: GroupQueue

    @classmethod
    def of(
        cls, trainer: Registration, training: TrainingService, groups: AtroposGroups, card: ModelCard
    ) -> AtroposParts:
        limits = TokenLimits(card.context_length, card.vocab_size)
        return cls(trainer, training, groups, limits, Environments(), GroupQueue(groups))

    @property
    def step(self) -> int:
        """Updates made so far, also before a restart."""
        return self.training.status(reader=EVERYTHING).step

    def source_of(self, key: NamedKey, data: ScoredData) -> str:
        environment = None if data.env_id is None else self.environments.known(data.env_id, key)
        return UNREGISTERED if environment is None else environment.source


async def parts_of(request: Request, services: ServicesDep) -> AtroposParts:
    """Raises UnknownModelError if the key does not see the default adapter, which these groups train."""
    services.require_training().status(reader=services.key.reader)
    parts: AtroposParts = services.extra("atropos")
    return parts


PartsDep = Annotated[AtroposParts, Depends(parts_of)]


# -- environments ----------------------------------------------------------------------------------


@router.get("/", role=Role.INFERENCE, response_model=dict[str, str])
async def root(request: Request, services: ServicesDep) -> Response | dict[str, str]:
    """Says what API this is. A browser gets the dashboard."""
    return page_for(request, services.config) or {"message": "AtroposLib API"}


@router.post("/register-env", role=Role.TRAIN)
async def register_env(
    body: Annotated[RegisterEnv, Depends(json_body(RegisterEnv))], services: ServicesDep, parts: PartsDep
) -> dict[str, Any]:
    """Registers an environment, whose groups have a part of the queue to themselves."""
    if body.min_batch_allocation is not None:
        raise InvalidRequestError(
            "min_batch_allocation: groups are trained in the order in which they come, without shares of a batch; "
            "leave it out.",
            param="min_batch_allocation",
        )
    environment, trainer = parts.environments.register(body, services.key), parts.trainer
    return {
        "status": "success",
        "env_id": environment.env_id,
        "wandb_name": environment.name,
        "checkpoint_dir": trainer.checkpoint_dir,
        "starting_step": parts.step,
        "checkpoint_interval": trainer.save_checkpoint_interval,
        "num_steps": trainer.num_steps,
    }


@router.post("/disconnect-env", role=Role.TRAIN)
async def disconnect_env(
    body: Annotated[EnvIdentifier, Depends(json_body(EnvIdentifier))], services: ServicesDep, parts: PartsDep
) -> dict[str, str]:
    """An environment ends. Its groups are trained on all the same."""
    if parts.environments.disconnect(body.env_id, services.key):
        return {"status": "success"}
    return {"status": "failure", "error": f"no environment has the id {body.env_id}"}


@router.get("/status-env", role=Role.TRAIN)
async def status_env(
    body: Annotated[EnvIdentifier, Depends(json_body(EnvIdentifier))], services: ServicesDep, parts: PartsDep
) -> dict[str, float | int]:
    """How many groups wait, by which an environment decides whether to make more. The request has a body, although it
    is a GET."""
    status = parts.environments.status(body.env_id, services.key, parts.groups.sizes())
    return {"current_step": parts.step, **status}


# -- groups ----------------------------------------------------------------------------------------


@router.post("/scored_data", role=Role.TRAIN)
async def scored_data(
    body: Annotated[ScoredData, Depends(json_body(ScoredData))],
    request: Request,
    services: ServicesDep,
    parts: PartsDep,
) -> dict[str, str]:
    """Adds a group to those that wait for an update. The answer comes when it is on the disk."""
    await _accept([body], request, services, parts)
    return {"status": "received"}


@router.post("/scored_data_list", role=Role.TRAIN)
async def scored_data_list(
    body: Annotated[ScoredDataList, Depends(json_body(ScoredDataList))],
    request: Request,
    services: ServicesDep,
    parts: PartsDep,
) -> dict[str, Any]:
    """Adds several groups, or none if one of them cannot be trained on."""
    await _accept(body.groups, request, services, parts)
    return {"status": "received", "groups_processed": len(body.groups)}


async def _accept(groups: list[ScoredData], request: Request, services: Services, parts: AtroposParts) -> None:
    def read() -> list[SentGroup]:
        return [SentGroup.of(data, parts.limits) for data in groups]

    sent = await services.workers.run(request.state.body_bytes, read)
    source_of = partial(parts.source_of, services.key)
    accepting = parts.queue.accept(sent, source_of, request.is_disconnected)
    await services.lifecycle.run_to_end(accepting)


@router.get("/latest_example", role=Role.ADMIN)
async def latest_example(services: ServicesDep, parts: PartsDep) -> Response:
    """The group that came last, or one without sequences."""
    latest = parts.queue.latest or ScoredData(tokens=[], masks=[], scores=[])
    size = sum(map(len, latest.tokens)) * 8
    text = await services.workers.run(size, latest.model_dump_json)
    return Response(text, media_type="application/json")


@router.get("/reset_data", role=Role.ADMIN, audited=True)
async def reset_data(parts: PartsDep) -> Response:
    """Forgets the environments. Groups that wait are in the journal, and are trained on."""
    parts.environments.forget_all()
    return PlainTextResponse("Reset successful")


# -- the trainer -----------------------------------------------------------------------------------

_IS_TRAINER = (
    "This server trains on these groups itself. Start another trainer against run-api, or this server without "
    "--atropos-api."
)


@router.post("/register", role=Role.TRAIN)
async def register() -> Response:
    """Refuses another trainer."""
    raise ConflictError(_IS_TRAINER)


@router.get("/batch", role=Role.TRAIN)
async def batch() -> Response:
    """Refuses another trainer, in the form in which Atropos refuses one that has not registered."""
    return JSONResponse({"status": "error", "message": _IS_TRAINER, "batch": []})


@router.get("/info", role=Role.TRAIN)
async def info(parts: PartsDep) -> dict[str, int]:
    """The trajectories of one update, and the length from which on environments drop a sequence."""
    return {"batch_size": parts.trainer.batch_size, "max_token_len": parts.trainer.max_token_len}


@router.get("/wandb_info", role=Role.TRAIN)
async def wandb_info(parts: PartsDep) -> dict[str, str]:
    """Where environments log."""
    return {"group": parts.trainer.wandb_group, "project": parts.trainer.wandb_project}


@router.get("/status", role=Role.TRAIN)
async def status(parts: PartsDep) -> dict[str, int]:
    """Updates made so far, and groups that wait."""
    return {"current_step": parts.step, "queue_size": sum(map(len, parts.groups.sizes().values()))}


def is_served(backend: Backend) -> bool:
    """Whether a server has these routes."""
    return backend.extra("atropos") is not None
