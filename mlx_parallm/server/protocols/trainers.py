"""What trainers of other projects ask of the inference server that they sample from, as they ask it of vLLM.

prime-rl loads each new policy from a folder with `/load_lora_adapter` under the same name, and TRL and ART with
`/v1/load_lora_adapter` under a new name or as `name@step`; see `api.adapters`. `/pause`, `/resume` and
`/reset_prefix_cache` are in `api.control`. The weights of whole models are not taken.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NoReturn

from fastapi import Depends
from pydantic import Field

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.adapters.route import load
from mlx_parallm.server.api.adapters.schema import MAX_PATH, BaseName, LoadedLora, Name
from mlx_parallm.server.api.fields import Neutral, WireInput, WireOutput
from mlx_parallm.server.body import json_body
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

router = Router()


# -- adapters --------------------------------------------------------------------------------------


class ReplaceLoraBody(WireInput):
    """An adapter to load in place of the one with its name; prime-rl's body."""

    NEUTRAL: ClassVar[Neutral] = {"is_3d_lora_weight": (False,), "load_inplace": (True,), "pinned": (False,)}

    lora_name: Name
    """The adapter's name, which may be in use already."""
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    """A folder under the operator's adapter roots."""
    base_model_name: BaseName | None = None
    """The base model that the adapter is for; by default, the one that its files name, or else the first one."""


@router.post(
    "/load_lora_adapter",
    role=Role.TRAIN,
    audited=True,
    examples={"from a folder": {"lora_name": "tone", "lora_path": "tone"}},
)
async def load_lora_adapter(
    body: Annotated[ReplaceLoraBody, Depends(json_body(ReplaceLoraBody))], services: ServicesDep
) -> LoadedLora:
    """Loads an adapter, and answers when the new version is live. Requests under way with this name keep the version
    that they began with, and later ones get the new one. `/v1/load_lora_adapter` does the same with `load_inplace`."""
    return await load(services, body.lora_name, body.lora_path, True, body.base_model_name)


# -- state -----------------------------------------------------------------------------------------


class Liveness(WireOutput):
    """The HTTP server answers."""

    status: str
    """Always `ok`."""


class WorldSize(WireOutput):
    """The processes that hold the model."""

    world_size: int
    """Always 1."""


@router.get("/liveness", role=None)
async def liveness() -> Liveness:
    """Whether the HTTP server answers. `/health` says whether the engine works too."""
    return Liveness(status="ok")


@router.get("/get_world_size", role=Role.INFERENCE)
async def get_world_size() -> WorldSize:
    """The number of processes that hold the model."""
    return WorldSize(world_size=1)


# -- weights of whole models -----------------------------------------------------------------------


@router.post("/update_weights", role=Role.TRAIN, include_in_schema=False, response_model=None)
async def refuse_weights() -> NoReturn:
    """Refuses the weights of a whole model. prime-rl takes a 404 for a server that needs no update, and goes on with
    the old weights; other trainers are told by the 404 of the routes that they call first."""
    raise InvalidRequestError(
        "This server takes no weights of a whole model: its base model is shared by all requests and never changes. "
        "Train a LoRA adapter and send each new one with POST /v1/load_lora_adapter (load_inplace true, or the name "
        "name@step) or POST /load_lora_adapter; or let this server train, with POST /v1/training/update."
    )
