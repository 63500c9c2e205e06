"""What routes of the Tinker API depend on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from mlx_parallm.errors import TrainingDisabledError, UnknownModelError
from mlx_parallm.extras.tinker.server import TinkerServer
from mlx_parallm.server.services import Services, ServicesDep


async def tinker_of(services: ServicesDep) -> TinkerServer:
    """The Tinker API for the request's key. Raises TrainingDisabledError if the server does not train."""
    tinker: TinkerServer | None = services.extra("tinker")
    if tinker is None:
        raise TrainingDisabledError("This server does not train, so it has no Tinker API: use --enable-rl-training.")
    return tinker.of(services.key)


TinkerDep = Annotated[TinkerServer, Depends(tinker_of)]


def check_base(services: Services, name: str | None) -> None:
    """Raises UnknownModelError unless `name` is one of the served model. Models start from it."""
    if name is None or not services.is_base(name):
        names = ", ".join(services.models.first.card.names)
        raise UnknownModelError(
            f"base_model: this server has {names}, and not {(name or 'none')[:100]!r}",
            param="base_model",
        )
