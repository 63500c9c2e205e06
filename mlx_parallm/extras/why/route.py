"""`/v1/training/why`: what a version consists of, and which of it pushed an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Query

from mlx_parallm.extras.why.cards import WhyVersion
from mlx_parallm.server.access import Role
from mlx_parallm.server.request import MAX_ADAPTER_NAME, adapter_named_by
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.extras.why.service import Why

MAX_UPDATES = 1000

router = Router()

Version = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_ADAPTER_NAME,
        description="A version, such as `math@3`, or the name of an adapter: its live version. Default: the live "
        "version of the default adapter.",
    ),
]


@router.get("/v1/training/why", role=Role.TRAIN)
async def version(
    services: ServicesDep,
    version: Version = None,
    update: Annotated[
        int | None, Query(ge=1, description="The number of one of its updates, to be shown with its trajectories.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_UPDATES, description="Maximum number of updates, the newest.")] = 100,
) -> WhyVersion:
    """What a version consists of, back to the base model: its updates, with the keys that have sent their trajectories,
    what rewarded these, and settings that changed; and of one update, its trajectories with reward, advantage and
    share. What the journal has no more is named. A key sees the trajectories that it has sent itself, and those that
    the server has sampled for tasks of its own; others are counted without a name."""
    why: Why = services.require_extra("why")
    with adapter_named_by("version", version):
        return await why.version(version, update, limit, services.key.reader)
