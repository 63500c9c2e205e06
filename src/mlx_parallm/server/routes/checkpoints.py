"""Adapter versions kept on disk."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from mlx_parallm.errors import ConflictError, EngineDeadError, StorageError, UnknownModelError
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.respond.adapters import checkpoint_object
from mlx_parallm.server.selectors import naming
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.adapters import Checkpoint, CheckpointList, SaveCheckpointBody

router = APIRouter()
SAVES = raises(UnknownModelError, ConflictError, StorageError, DrainingError, EngineDeadError)
Body = Annotated[SaveCheckpointBody, Depends(json_body(SaveCheckpointBody))]


@router.get("/v1/checkpoints")
async def list_checkpoints(services: ServicesDep) -> CheckpointList:
    """Oldest first."""
    return CheckpointList(object="list", data=[checkpoint_object(card) for card in services.adapters.checkpoints()])


@router.post("/training/checkpoint", responses=SAVES, openapi_extra=request_body(SaveCheckpointBody))
@router.post("/v1/training/checkpoint", responses=SAVES, openapi_extra=request_body(SaveCheckpointBody))
async def save_checkpoint(body: Body, services: ServicesDep) -> Checkpoint:
    """Answers when the files are whole on disk; a client that leaves meanwhile stops nothing. An adapter in training
    is saved with its optimizer's state."""
    tags = [] if body.checkpoint_name is None else [body.checkpoint_name]
    with naming("lora_name", body.lora_name or ""):
        trained = services.training.trains(body.lora_name)
        save = services.training.save if trained else services.adapters.save_checkpoint
        saving = save(body.lora_name, body.step, tags, body.metrics)
        return checkpoint_object(await services.lifecycle.see_through(saving))
