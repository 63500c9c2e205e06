"""Saving and loading weights with the Tinker API, and lists of what is saved."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Depends, Query

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.extras.tinker.bodies import Read, json_of
from mlx_parallm.extras.tinker.dependencies import TinkerDep, check_base
from mlx_parallm.extras.tinker.schema import LoadBody, SaveBody, WeightsInfoBody
from mlx_parallm.extras.tinker.server import TinkerServer
from mlx_parallm.extras.tinker.sessions import SavedWeights, TinkerModel, is_of
from mlx_parallm.server.access import Role
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

_TYPES = {"weights": "training", "sampler_weights": "sampler"}
"""Types of checkpoints, by the part of the path that says what they were saved for."""

router = Router(prefix="/api/v1", include_in_schema=False)


@router.post("/save_weights", role=Role.TRAIN)
async def save_weights(
    read: Annotated[Read[SaveBody], Depends(json_of(SaveBody))], services: ServicesDep, tinker: TinkerDep
) -> dict[str, Any]:
    services.check_open()
    return {"request_id": tinker.save(read.body, read.digest), "model_id": read.body.model_id}


@router.post("/save_weights_for_sampler", role=Role.TRAIN)
async def save_weights_for_sampler(
    read: Annotated[Read[SaveBody], Depends(json_of(SaveBody))], services: ServicesDep, tinker: TinkerDep
) -> dict[str, Any]:
    services.check_open()
    return {"request_id": tinker.save_for_sampler(read.body, read.digest), "model_id": read.body.model_id}


@router.post("/load_weights", role=Role.TRAIN)
async def load_weights(
    read: Annotated[Read[LoadBody], Depends(json_of(LoadBody))], services: ServicesDep, tinker: TinkerDep
) -> dict[str, Any]:
    if read.body.base_model is not None:
        check_base(services, read.body.base_model)
    services.check_open()
    request_id, model_id = tinker.load(read.body, read.digest)
    return {"request_id": request_id, "model_id": model_id}


@router.post("/weights_info", role=Role.TRAIN)
async def weights_info(
    read: Annotated[Read[WeightsInfoBody], Depends(json_of(WeightsInfoBody))],
    services: ServicesDep,
    tinker: TinkerDep,
) -> dict[str, Any]:
    saved = SavedWeights.of(read.body.tinker_path, tinker.key)
    card = next((each for each in tinker.policies.checkpoints(saved.adapter) if saved.tag in each.tags), None)
    if card is None:
        raise saved.missing()
    layers = tinker.policies.layers_of(card.targets)
    return {
        "base_model": services.models.first.card.name,
        "is_lora": True,
        "lora_rank": card.rank,
        "train_unembed": layers.head,
        "train_mlp": layers.mlp,
        "train_attn": layers.attention,
    }


@router.get("/training_runs", role=Role.TRAIN)
async def training_runs(
    services: ServicesDep,
    tinker: TinkerDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, le=10**6)] = 0,
) -> dict[str, Any]:
    """The models of this key that are in training now; for an admin key, those of all keys."""
    every = [model for session in tinker.sessions.of(tinker.key) for model in session.models.values()]
    runs = [_training_run(each, services, tinker) for each in every[offset : offset + limit]]
    return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(every)}}


@router.get("/training_runs/{model_id}", role=Role.TRAIN)
async def training_run(model_id: str, services: ServicesDep, tinker: TinkerDep) -> dict[str, Any]:
    return _training_run(tinker.sessions.model(model_id, tinker.key), services, tinker)


@router.get("/training_runs/{model_id}/checkpoints", role=Role.TRAIN)
async def checkpoints(model_id: str, tinker: TinkerDep) -> dict[str, Any]:
    """What was saved of a model, which need not be in training any more."""
    if not is_of(tinker.key, model_id):  # as for a model of which nothing was saved
        return {"checkpoints": []}
    return {
        "checkpoints": _saved_of(model_id, SavedWeights.named(model_id, "weights", "any", tinker.key).adapter, tinker)
    }


def _training_run(model: TinkerModel, services: Services, tinker: TinkerServer) -> dict[str, Any]:
    saved = _saved_of(model.model_id, model.adapter, tinker)
    last = {
        kind: next((each for each in reversed(saved) if each["checkpoint_type"] == kind), None)
        for kind in _TYPES.values()
    }
    return {
        "training_run_id": model.model_id,
        "base_model": services.models.first.card.name,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": tinker.rank(model),
        "last_request_time": _time(model.last_request),
        "last_checkpoint": last["training"],
        "last_sampler_checkpoint": last["sampler"],
    }


def _saved_of(model_id: str, adapter: str, tinker: TinkerServer) -> list[dict[str, Any]]:
    """The checkpoints of a model, oldest first, each once for every name that it was saved under."""
    cards = tinker.policies.checkpoints(adapter)
    names = ((card, *tag.partition("-")[::2]) for card in cards for tag in card.tags)
    return [_checkpoint(model_id, card, kind, name) for card, kind, name in names if kind in _TYPES and name]


def _checkpoint(model_id: str, card: CheckpointCard, kind: str, name: str) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": _TYPES[kind],
        "time": _time(card.created),
        "tinker_path": f"tinker://{model_id}/{kind}/{name}",
        "size_bytes": card.bytes,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
