"""`/v1/training/trajectories`: the groups that were collected, as a list in pages, and one of them in full."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.core import GroupFilter
from mlx_parallm.errors import TrainingDisabledError, UnknownTrajectoryError
from mlx_parallm.server.api.adapters.schema import MAX_NAME
from mlx_parallm.server.api.training.collected.schema import CollectedGroupObject, Fate, GroupPageObject
from mlx_parallm.server.api.training.collected.texts import MAX_SAMPLES, group_json, page_json
from mlx_parallm.server.http.request_log import key_of
from mlx_parallm.server.openapi.responses import raises
from mlx_parallm.server.services import ServicesDep, TrainingDep

MAX_ROWS, MAX_ID = 500, 256
_ROW_BYTES, _GROUP_BYTES = 512, 2**20
"""Rough estimates of the lengths of a row, and of a large group, as JSON."""

router = APIRouter()

Name = Annotated[str | None, Query(max_length=MAX_NAME)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("/v1/training/trajectories", response_model=GroupPageObject, responses=raises(TrainingDisabledError))
async def groups(
    request: Request,
    services: ServicesDep,
    training: TrainingDep,
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS, description="Maximum number of groups.")] = 100,
    after: Annotated[
        int | None, Query(ge=0, description="Only groups that are older than the one with this `number`.")
    ] = None,
    lora_adapter: Annotated[Name, Query(description="Only groups that train this adapter.")] = None,
    lora_version: Annotated[Name, Query(description="Only groups that this version drew, such as `math@3`.")] = None,
    fate: Annotated[Fate | None, Query(description="Only groups with this fate.")] = None,
    min_reward: Annotated[Reward, Query(description="Only groups with at least this mean reward.")] = None,
    max_reward: Annotated[Reward, Query(description="Only groups with at most this mean reward.")] = None,
) -> Response:
    """The groups of trajectories that wait for an update, and the last ones that were trained on or dropped since the
    server started; newest first. As many trajectories of each kind are kept as
    `rl_training.trajectory_buffer_size` says. A key sees what it has sent itself, and what the server has drawn for
    tasks of its own; an admin key sees everything."""
    wanted = GroupFilter(lora_adapter, lora_version, fate, min_reward, max_reward)
    page = await training.collected_groups.page(wanted, after, limit, key_of(request.scope).reader)
    write = partial(page_json, page, services.first.tokenizer)
    return _json(await services.workers.run(_ROW_BYTES * len(page.rows), write))


@router.get(
    "/v1/training/trajectories/{group_id:path}",
    response_model=CollectedGroupObject,
    responses=raises(UnknownTrajectoryError, TrainingDisabledError),
)
async def group(
    group_id: Annotated[str, Path(max_length=MAX_ID, description="The id of a group, or of one of its trajectories.")],
    request: Request,
    services: ServicesDep,
    training: TrainingDep,
) -> Response:
    """One group with its prompt and its samples: their tokens with log-probabilities and advantages, rewards, what
    became of them, and what people have said about them. Long texts are cut."""
    found = training.collected_groups.group(group_id, MAX_SAMPLES, key_of(request.scope).reader)
    write = partial(group_json, found, services.first.tokenizer)
    return _json(await services.workers.run(_GROUP_BYTES, write))


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")
