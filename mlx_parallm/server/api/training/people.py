"""`/v1/training/preference` and `/v1/training/report`: edited answers, and what was learnt from whom."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request

from mlx_parallm.core import FoundTrajectory, Reader, TrainingClient
from mlx_parallm.errors import (
    ConflictError,
    ContextLengthError,
    QueueFullError,
    StorageError,
    TrainingDisabledError,
    UnknownModelError,
    UnknownTrajectoryError,
)
from mlx_parallm.server.api.training.edits import adapter_of, edit_of
from mlx_parallm.server.api.training.people_schema import (
    PreferenceBody,
    PreferenceObject,
    ReportObject,
    preference_object,
    report_object,
)
from mlx_parallm.server.http.body import json_body
from mlx_parallm.server.http.request_log import key_of
from mlx_parallm.server.openapi.responses import raises
from mlx_parallm.server.planning import adapter_named_by
from mlx_parallm.server.services import KeyDep, ServicesDep, TrainingDep

EDIT_ERRORS = (
    UnknownTrajectoryError,
    UnknownModelError,
    ConflictError,
    ContextLengthError,
    TrainingDisabledError,
    QueueFullError,
    StorageError,
)

router = APIRouter()


@router.post("/v1/training/preference", responses=raises(*EDIT_ERRORS))
async def preference(
    body: Annotated[PreferenceBody, Depends(json_body(PreferenceBody))],
    request: Request,
    services: ServicesDep,
    training: TrainingDep,
) -> PreferenceObject:
    """Takes an edited answer: a preference of one answer over another, or a correction that is imitated. It may be
    about any answer of this run, also one that was trained on or dropped. The answer comes when the edit is on the
    disk, so that a crash does not lose it."""
    with adapter_named_by("lora_adapter", body.lora_adapter):
        key = key_of(request.scope)
        found = {field: await _found(training, field, named, key.reader) for field, named in body.trajectories.items()}
        named = body.lora_adapter
        default = training.default_adapter if named is None else training.status(named, reader=key.reader).adapter
        adapter = adapter_of(body, found, default)
        encode = partial(edit_of, body, found, adapter, services)
        edit = replace(await services.workers.run(request.state.body_bytes, encode), owner=key.name)
        return preference_object(await services.lifecycle.run_to_end(training.people.edit(edit, key.reader)))


async def _found(training: TrainingClient, field: str, trajectory_id: str, reader: Reader) -> FoundTrajectory:
    """The trajectory that a field names. Raises UnknownTrajectoryError, naming the field, if there is none."""
    try:
        return await training.people.find(trajectory_id, reader)
    except UnknownTrajectoryError as error:
        raise UnknownTrajectoryError(f"{field}: {error}", param=field) from None


@router.get("/v1/training/report", responses=raises(UnknownModelError, TrainingDisabledError))
async def report(
    training: TrainingDep,
    key: KeyDep,
    lora_adapter: Annotated[str | None, Query(description="A trained adapter. Default: the default adapter.")] = None,
) -> ReportObject:
    """What an adapter was taught by since the server started: how much came from each source, what became of it, and
    what the updates that learnt from it changed."""
    with adapter_named_by("lora_adapter", lora_adapter):
        return report_object(training.people.signal_report(lora_adapter, key.reader))
