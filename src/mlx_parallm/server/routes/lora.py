"""vLLM's runtime routes for adapters, and `switch-lora`: all of them change what later requests get, no other."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from mlx_parallm.errors import (
    AdapterFileError,
    AdapterUnavailableError,
    ConflictError,
    EngineDeadError,
    UnknownModelError,
)
from mlx_parallm.server.body import json_body, request_body
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.respond.adapters import loaded_object
from mlx_parallm.server.selectors import naming
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.wire.adapters import (
    LoadedLora,
    LoadLoraBody,
    SwitchedLora,
    SwitchLoraBody,
    UnloadedLora,
    UnloadLoraBody,
)

router = APIRouter()
LOADS = raises(AdapterFileError, DrainingError, EngineDeadError)
UNLOADS = raises(UnknownModelError, ConflictError, DrainingError)
SWITCHES = raises(UnknownModelError, AdapterUnavailableError, DrainingError, EngineDeadError)


@router.post("/v1/load_lora_adapter", responses=LOADS, openapi_extra=request_body(LoadLoraBody))
async def load_lora_adapter(
    body: Annotated[LoadLoraBody, Depends(json_body(LoadLoraBody))], services: ServicesDep
) -> LoadedLora:
    """Answers when the name means the files' content; a client that leaves meanwhile stops nothing."""
    loading = services.adapters.load(body.lora_name, body.lora_path, body.load_inplace)
    return loaded_object(await services.lifecycle.see_through(loading))


@router.post("/v1/unload_lora_adapter", responses=UNLOADS, openapi_extra=request_body(UnloadLoraBody))
async def unload_lora_adapter(
    body: Annotated[UnloadLoraBody, Depends(json_body(UnloadLoraBody))], services: ServicesDep
) -> UnloadedLora:
    """Forgets a name, or one version of it; requests that hold it end undisturbed."""
    return await unload(services, body.lora_name, "lora_name")


@router.post("/model/switch-lora", responses=SWITCHES, openapi_extra=request_body(SwitchLoraBody))
@router.post("/v1/model/switch-lora", responses=SWITCHES, openapi_extra=request_body(SwitchLoraBody))
async def switch_lora(
    body: Annotated[SwitchLoraBody, Depends(json_body(SwitchLoraBody))], services: ServicesDep
) -> SwitchedLora:
    """Sends every request that names no adapter to one version."""
    with naming("version", body.version):
        route = await services.lifecycle.see_through(services.adapters.set_route({body.version: 1.0}))
    with services.adapters.lease(None) as current:
        return SwitchedLora(status="success", current_lora=str(current), route=dict(route))


async def unload(services: Services, selector: str, param: str | None) -> UnloadedLora:
    """Raises UnknownModelError, naming `param`: nothing has that name."""
    with naming(param, selector):
        gone = await services.lifecycle.see_through(services.adapters.unload(selector))
    return UnloadedLora(status="success", unloaded=[str(ref) for ref in gone])
