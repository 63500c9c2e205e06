"""`GET /v1/models`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from mlx_parallm.core import AdapterCard
from mlx_parallm.errors import UnknownModelError
from mlx_parallm.server.openapi import raises
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.wire.misc import Model, ModelList

router = APIRouter()
Name = Annotated[str, Path(description="The served model, `base`, an adapter, or `name@version`.")]


@router.get("/v1/models", response_model_exclude_unset=True)
async def list_models(services: ServicesDep) -> ModelList:
    """What `model` may name: the base, then each adapter's live version."""
    live = [_adapter(card, services) for card in services.adapters.cards() if card.live]
    return ModelList(object="list", data=[_base(services), *live])


@router.get("/v1/models/{name:path}", response_model_exclude_unset=True, responses=raises(UnknownModelError))
async def get_model(name: Name, services: ServicesDep) -> Model:
    """One model; hub ids have a slash in them, and are taken as they are. `name@version` is taken too."""
    return _base(services) if services.is_base(name) else _adapter(services.find(name, "model"), services)


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


def _adapter(card: AdapterCard, services: Services) -> Model:
    return Model(
        id=card.ref.name if card.live else str(card.ref),
        object="model",
        created=card.created,
        owned_by="mlx_parallm",
        root=card.root or card.ref.name,
        parent=services.card.name,
        max_model_len=services.card.context_length,
        version=card.ref.version,
    )
