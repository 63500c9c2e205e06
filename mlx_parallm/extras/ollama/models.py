"""The models as Ollama's clients see them: `/api/tags`, `/api/ps`, `/api/show`, `/api/version`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends

from mlx_parallm.adapters.cards import AdapterCard, Residence
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.models import BaseStatus, ModelState, ServedModel
from mlx_parallm.extras.ollama.objects import (
    Capability,
    ListedModel,
    ListedModels,
    ModelDetails,
    OllamaVersion,
    ShownModel,
    timestamp,
)
from mlx_parallm.extras.ollama.schema import ShowBody, ollama_body
from mlx_parallm.server.access import Role
from mlx_parallm.server.request import used_defaults
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

API_VERSION = "0.14.0"
"""What `/api/version` answers. Clients compare it with the oldest version of Ollama that they support."""
LATEST = ":latest"
IN_MEMORY = (ModelState.LOADED, ModelState.LEAVING)
MODELFILE_NAMES = {"max_new_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
"""Ollama's names of sampling defaults, where they differ."""
NEVER = "2318-01-01T00:00:00.000000Z"
"""When a model leaves memory. Ollama answers with about this time for a model that stays."""

router = Router(tags=["Ollama"])


def known_name(name: str | None, services: Services) -> str | None:
    """The name without the tag `:latest`, which Ollama's clients may add, unless a model has it in its own name."""
    return name if name is None or _names_base(name, services) else name.removesuffix(LATEST)


async def load(name: str | None, services: Services) -> str:
    """Loads the model with this name, if it is not in memory, and returns the name that answers have.

    Raises:
        UnknownModelError: there is no such model.
    """
    known = known_name(name, services)
    services.check_model(known)
    async with services.model_for(known) as model:
        return model.card.name if known is None or _names_base(known, services) else known


def _names_base(name: str, services: Services) -> bool:
    return services.is_base(name) or name in services.models.names


@router.get("/api/version", role=Role.INFERENCE)
async def version() -> OllamaVersion:
    """The version of Ollama whose API this is. That of the server is at `/version`."""
    return OllamaVersion(version=API_VERSION)


@router.get("/api/tags", role=Role.INFERENCE, response_model_exclude_unset=True)
async def list_tags(services: ServicesDep) -> ListedModels:
    """The names that `model` accepts: those of the base models, and one for the live version of each adapter."""
    first, *others = services.models.statuses()
    names = [*((name, first) for name in services.models.first.card.names), *((one.name, one) for one in others)]
    bases = [_base(name, status, services) for name, status in names] if services.sees_base else []
    return ListedModels(models=[*bases, *(_adapter(card, services) for card in _live(services))])


@router.get("/api/ps", role=Role.INFERENCE, response_model_exclude_unset=True)
async def list_running(services: ServicesDep) -> ListedModels:
    """The models in memory: base models, and adapters."""
    bases = [each for each in services.models.statuses() if services.sees_base and each.state in IN_MEMORY]
    loaded = [adapter for adapter in _live(services) if adapter.residence is not Residence.FILE]
    return ListedModels(
        models=[
            *(_running(_base(status.name, status, services), status.card) for status in bases),
            *(_running(_adapter(adapter, services), _card_of(adapter, services)) for adapter in loaded),
        ]
    )


@router.post("/api/show", role=Role.INFERENCE, examples={"an adapter": {"model": "math"}})
async def show(body: Annotated[ShowBody, Depends(ollama_body(ShowBody))], services: ServicesDep) -> ShownModel:
    """Describes one model: its context's length, its chat template, and what it can do. Loads it if it is not in
    memory."""
    name = known_name(body.model or body.name, services)
    services.check_model(name)
    async with services.model_for(name) as served:
        card = served.card
        adapter = None if name is None or _names_base(name, services) else services.find(name, "model")
    return ShownModel(
        details=_details(card, "" if adapter is None else card.name),
        model_info={
            "general.architecture": card.architecture,
            "general.parameter_count": card.parameters,
            f"{card.architecture}.context_length": card.context_length,
        },
        capabilities=list(_capabilities(served)),
        template=served.tokenizer.chat_template or "",
        parameters=_parameters(card, services),
        modified_at=timestamp(services.started_at if adapter is None else adapter.created),
    )


def _live(services: Services) -> Iterator[AdapterCard]:
    return (card for card in services.adapters.cards() if card.live)


def _card_of(adapter: AdapterCard, services: Services) -> ModelCard | None:
    """The card of an adapter's base model."""
    if not adapter.base:
        return services.models.first.card
    return next((status.card for status in services.models.statuses() if status.name == adapter.base), None)


def _base(name: str, status: BaseStatus, services: Services) -> ListedModel:
    return ListedModel(
        name=name,
        model=name,
        modified_at=timestamp(services.started_at),
        size=status.card.weight_bytes if status.card else 0,
        digest=_digest(status.name),
        details=_details(status.card, ""),
    )


def _adapter(adapter: AdapterCard, services: Services) -> ListedModel:
    parent = adapter.base or services.models.first.card.name
    return ListedModel(
        name=adapter.ref.name,
        model=adapter.ref.name,
        modified_at=timestamp(adapter.created),
        size=adapter.bytes,
        digest=_digest(parent, str(adapter.ref)),
        details=_details(_card_of(adapter, services), parent),
    )


def _running(model: ListedModel, card: ModelCard | None) -> ListedModel:
    """An entry of `/api/ps`. A base model in memory has a card."""
    assert card is not None
    same = model.model_dump(exclude={"modified_at"}, exclude_unset=True)
    return ListedModel(**same, expires_at=NEVER, size_vram=model.size, context_length=card.context_length)


def _digest(*names: str) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _details(card: ModelCard | None, parent: str) -> ModelDetails:
    """What is known of a base model, which is nothing until it has been loaded once."""
    if card is None:
        return ModelDetails(
            parent_model=parent, format="mlx", family="", families=[], parameter_size="", quantization_level=""
        )
    return ModelDetails(
        parent_model=parent,
        format="mlx",
        family=card.architecture,
        families=[card.architecture],
        parameter_size=_short(card.parameters),
        quantization_level=card.dtype if card.quantization == "none" else card.quantization,
    )


def _short(count: int) -> str:
    """A number of parameters, such as 134.5M."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _capabilities(model: ServedModel) -> Iterator[Capability]:
    yield "completion"
    if model.tokenizer.chat_template is not None:
        yield "tools"
    if model.tokenizer.reasoning is not None:
        yield "thinking"
    yield "embedding"


def _parameters(card: ModelCard, services: Services) -> str:
    """The lines of a Modelfile without their keyword."""
    values = {"num_ctx": card.context_length, **used_defaults(card, services.config)}
    return "\n".join(f"{MODELFILE_NAMES.get(name, name):<30} {value}" for name, value in values.items())
