"""What every route needs, in one object on `app.state.services`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from mlx_parallm.core import BASE_ADAPTER, EngineClient, ModelCard, TextTokenizer
from mlx_parallm.errors import EngineDeadError, InvalidRequestError, UnknownModelError
from mlx_parallm.server.errors import DrainingError
from mlx_parallm.server.lifecycle import Lifecycle
from mlx_parallm.server.limits import SequenceGate
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Services:
    """The parts behind the routes. `started_at` is Unix time in seconds."""

    engine: EngineClient
    tokenizer: TextTokenizer
    card: ModelCard
    settings: ServerSettings
    lifecycle: Lifecycle
    gate: SequenceGate
    metrics: ServerMetrics
    started_at: int

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """A place in the bounded queue while the block runs.

        Raises:
            DrainingError, EngineDeadError: nothing is admitted any more.
            OverloadedError: the queue is full.
        """
        if self.lifecycle.draining:
            raise DrainingError("draining")
        if not self.engine.stats().alive:
            raise EngineDeadError("the device thread is not running")
        with self.gate.reserve(sequences):
            yield

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is left out, or names what is served."""
        if name not in (None, self.card.name, BASE_ADAPTER.name):
            raise UnknownModelError(f"The model {name[:100]!r} is not served here; see GET /v1/models.", param="model")

    def check_sequences(self, prompts: int, n: int) -> int:
        """The sequences of a request. Raises InvalidRequestError when there are too many."""
        most = self.settings.max_sequences_per_request
        if prompts * n > most:
            raise InvalidRequestError(
                f"n times the number of prompts is {prompts * n}; at most {most} sequences fit one request.", param="n"
            )
        return prompts * n


async def services_of(request: Request) -> Services:
    """The app's services, as a FastAPI dependency."""
    return cast(Services, request.app.state.services)


ServicesDep = Annotated[Services, Depends(services_of)]
