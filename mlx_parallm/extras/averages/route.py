"""`/v1/training/average`: the weighted mean of adapters as a version, evaluated before it goes live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from pydantic import Field

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.extras.averages.service import AverageCard, AverageSpec
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import INT32_MAX, WireInput
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import MAX_ADAPTER_NAME, adapter_named_by
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.extras.averages.service import Averages

MAX_ADAPTERS = 64


router = Router()

Selector = Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]


class AverageBody(WireInput):
    """The adapters to average."""

    adapters: Annotated[list[Selector], Field(min_length=2, max_length=MAX_ADAPTERS)]
    """Two versions or more, each a name, `name@version`, or a checkpoint of the default adapter."""
    weights: Annotated[list[float], Field(max_length=MAX_ADAPTERS)] | None = None
    """One number above 0 for each adapter, such as its number of examples. By default, all weigh the same."""
    rank: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Largest rank of the average. By default, the sum of the adapters' ranks, at which it is exact."""
    lora_adapter: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]
    """The adapter that the average becomes a version of. It must not be in training."""


@router.post(
    "/v1/training/average",
    role=Role.TRAIN,
    audited=True,
    examples={"two sites": {"adapters": ["north", "south"], "lora_adapter": "mean", "rank": 16}},
)
async def average(body: Annotated[AverageBody, Depends(json_body(AverageBody))], services: ServicesDep) -> AverageCard:
    """Makes the weighted mean of what adapters add to each linear a version of an adapter. If the server evaluates
    versions, the average is evaluated first, and is held if that fails or if its mean reward is below
    `gate.eval_floor`. When the answer comes, it is live and has a checkpoint, or is held."""
    averages: Averages = services.require_extra("averages")
    for selector in body.adapters:
        if selector != BASE_ADAPTER.name:  # which no average is of
            services.find(selector, "adapters")
    with adapter_named_by("lora_adapter", body.lora_adapter):
        services.key.reader.named(body.lora_adapter, "")
    spec = AverageSpec(body.adapters, body.lora_adapter, body.weights, body.rank)
    with adapter_named_by("adapters", *body.adapters):
        return await services.lifecycle.run_to_end(averages.average(spec))
