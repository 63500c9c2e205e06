"""`/v1/training/forget`: what an adapter has learnt from is left out, and the adapter is built anew without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from pydantic import Field

from mlx_parallm.extras.forgetting.cards import ForgetCard, ForgetPlan
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import MAX_NAME, WireInput
from mlx_parallm.server.body import json_body
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.extras.forgetting.service import Forgetting

MAX_TRAJECTORIES = 10_000

router = Router()

_Seconds = Annotated[float, Field(ge=0, le=253_402_300_799)]
"""Unix time, up to the year 9999."""


class ForgetBody(WireInput):
    """What to forget: a key, trajectories, or a time."""

    key: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    """The name of an API key: all that it has asked for, given or judged up to now."""
    trajectory_ids: Annotated[list[str], Field(min_length=1, max_length=MAX_TRAJECTORIES)] | None = None
    """Ids of collected answers. Of an episode, all turns are forgotten."""
    since: _Seconds | None = None
    """Unix time: what was sampled or given from then on."""
    until: _Seconds | None = None
    """Unix time: what was sampled or given before then."""
    from_scratch: bool = False
    """Whether answers are left out too that a version sampled which had learnt from it."""
    ignore_floor: bool = False
    """Whether the rebuilt version goes live even if its evaluation is below `gate.eval_floor`."""
    dry_run: bool = False
    """Whether nothing is changed; the answer says what would be."""

    def spec(self) -> ForgetSpec:
        """Raises InvalidRequestError: it is not one of them."""
        return ForgetSpec(self.key, tuple(self.trajectory_ids or ()), self.since, self.until, self.from_scratch)


@router.post(
    "/v1/training/forget",
    role=Role.ADMIN,
    audited=True,
    examples={"what would be done": {"key": "alice", "dry_run": True}, "a key": {"key": "alice"}},
)
async def forget(
    body: Annotated[ForgetBody, Depends(json_body(ForgetBody))], services: ServicesDep
) -> ForgetPlan | ForgetCard:
    """Builds adapters anew from the journal without some of what they have learnt from, evaluates them, makes them
    live, and removes what is kept of it. The answer comes when this has begun; it goes on if the server is started
    again meanwhile. This is no unlearning: later answers came from versions that had learnt from it."""
    forgetting: Forgetting = services.require_extra("forgetting")
    if body.dry_run:
        return await forgetting.plan(body.spec())
    return await services.lifecycle.run_to_end(forgetting.begin(body.spec(), body.ignore_floor))


@router.get("/v1/training/forget", role=Role.ADMIN)
async def forgetting_status(services: ServicesDep) -> ForgetCard:
    """What is being forgotten, or was last since the server started."""
    forgetting: Forgetting = services.require_extra("forgetting")
    return forgetting.card
