"""`GET /v1/models`."""

from __future__ import annotations

from fastapi import APIRouter

from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.wire.misc import Model, ModelList

router = APIRouter()


@router.get("/v1/models")
async def list_models(services: ServicesDep) -> ModelList:
    """What `model` may name."""
    return ModelList(object="list", data=[_base(services)])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, services: ServicesDep) -> Model:
    """One model; hub ids have a slash in them, and are taken as they are."""
    services.check_model(name)
    return _base(services)


def _base(services: Services) -> Model:
    return Model(
        id=services.card.name,
        object="model",
        created=services.started_at,
        owned_by="mlx_parallm",
        root=services.card.name,
        parent=None,
        max_model_len=services.card.context_length,
    )
