"""`/v1/adapters`: what there is, where requests that name none of it go, and the way back.

`route` and `rollback` come before `{selector}`, which would take them.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from mlx_parallm.core import BASE_ADAPTER
from mlx_parallm.errors import AdapterUnavailableError, ConflictError, EngineDeadError, UnknownModelError
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.respond.adapters import adapter_object
from mlx_parallm.server.routes.lora import UNLOADS, unload
from mlx_parallm.server.selectors import naming
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.wire.adapters import (
    Adapter,
    AdapterList,
    RollbackBody,
    RolledBack,
    Route,
    RouteBody,
    Slots,
    UnloadedLora,
)

router = APIRouter()
STAGES = raises(UnknownModelError, AdapterUnavailableError, DrainingError, EngineDeadError)
Selector = Annotated[
    str, Path(description="`name` (its live version), `name@version`, or a checkpoint of the default adapter.")
]


@router.get("/v1/adapters")
async def list_adapters(services: ServicesDep) -> AdapterList:
    """Every version that can be asked for, and the state of the bank."""
    stats = services.adapters.stats()
    return AdapterList(
        object="list",
        data=[adapter_object(card) for card in services.adapters.cards()],
        route=dict(services.adapters.route()),
        slots=Slots(total=stats.slots, used=stats.slots_used, pinned=stats.slots_pinned),
        bank_bytes=stats.bank_bytes,
    )


@router.get("/v1/adapters/route")
async def get_route(services: ServicesDep) -> Route:
    """Where requests that name no adapter go."""
    return Route(route=dict(services.adapters.route()))


@router.post("/v1/adapters/route", responses=STAGES, openapi_extra=request_body(RouteBody))
async def set_route(body: Annotated[RouteBody, Depends(json_body(RouteBody))], services: ServicesDep) -> Route:
    """Splits requests that name no adapter between versions, in proportion to the weights."""
    with naming("weights", *body.weights):
        route = await services.lifecycle.see_through(services.adapters.set_route(body.weights))
    return Route(route=dict(route))


@router.delete("/v1/adapters/route", responses=raises(DrainingError, EngineDeadError))
async def reset_route(services: ServicesDep) -> Route:
    """Sends requests that name no adapter to the base."""
    to_base = services.adapters.set_route({BASE_ADAPTER.name: 1.0})
    return Route(route=dict(await services.lifecycle.see_through(to_base)))


@router.post(
    "/v1/adapters/rollback",
    responses=raises(UnknownModelError, ConflictError, DrainingError),
    openapi_extra=request_body(RollbackBody),
)
async def roll_back(
    body: Annotated[RollbackBody, Depends(json_body(RollbackBody))], services: ServicesDep
) -> RolledBack:
    """Makes a name mean the version it meant before, or takes back the last change of the route."""
    with naming("lora_name", body.lora_name or ""):
        live, route = await services.lifecycle.see_through(services.adapters.rollback(body.lora_name))
    return RolledBack(status="success", lora_adapter=str(live), route=dict(route))


@router.get("/v1/adapters/{selector:path}", responses=raises(UnknownModelError))
async def get_adapter(selector: Selector, services: ServicesDep) -> Adapter:
    """The version that a selector means."""
    return adapter_object(services.find(selector, "selector"))


@router.delete("/v1/adapters/{selector:path}", responses=UNLOADS)
async def delete_adapter(selector: Selector, services: ServicesDep) -> UnloadedLora:
    """The same as `/v1/unload_lora_adapter`."""
    return await unload(services, selector, "selector")
