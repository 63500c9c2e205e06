"""What every route needs, in one object on `app.state.services`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from mlx_parallm.core import (
    BASE_ADAPTER,
    AdapterCard,
    AdapterClient,
    AdapterRef,
    EngineClient,
    GrammarCompiler,
    ModelCard,
    TextTokenizer,
    TrainingClient,
)
from mlx_parallm.errors import EngineDeadError, InvalidRequestError
from mlx_parallm.server.errors import AsleepError, DrainingError, InferenceDisabledError
from mlx_parallm.server.lifecycle import Lifecycle
from mlx_parallm.server.limits import SequenceGate
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.no_training import refuse_training
from mlx_parallm.server.respond.schedule import mode_of
from mlx_parallm.server.response_store import ResponseStore
from mlx_parallm.server.scheduling import Rescheduler
from mlx_parallm.server.selectors import Choice, naming
from mlx_parallm.server.settings import ServerSettings
from mlx_parallm.server.sleeping import SleepSwitch
from mlx_parallm.server.wire.control import ServerMode
from mlx_parallm.server.workers import Workers


@dataclass(frozen=True, slots=True)
class Services:
    """The parts behind the routes. `started_at` is Unix time in seconds."""

    engine: EngineClient
    adapters: AdapterClient
    training: TrainingClient
    tokenizer: TextTokenizer
    grammars: GrammarCompiler
    card: ModelCard
    settings: ServerSettings
    lifecycle: Lifecycle
    gate: SequenceGate
    sleep: SleepSwitch
    rescheduler: Rescheduler
    metrics: ServerMetrics
    responses: ResponseStore
    workers: Workers
    started_at: int

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """A place in the bounded queue while the block runs.

        Raises:
            DrainingError, EngineDeadError: nothing is admitted any more.
            InferenceDisabledError: nothing ever is.
            AsleepError: nothing is until somebody wakes the server.
            OverloadedError: the queue is full.
        """
        self.check_open()
        if not self.engine.stats().alive:
            raise EngineDeadError("the device thread is not running")
        with self.gate.reserve(sequences):
            yield

    def check_open(self) -> None:
        """Raises DrainingError, InferenceDisabledError, AsleepError: generation requests are not wanted now."""
        if self.lifecycle.draining:
            raise DrainingError("draining")
        if not self.settings.inference:
            raise InferenceDisabledError("training only")
        if self.sleep.asleep:
            raise AsleepError("asleep")

    @property
    def mode(self) -> ServerMode:
        """What the server does with its device time now."""
        if not self.settings.inference:
            return "training_only"
        if not self.training.status().enabled:
            return "inference_only"
        return mode_of(self.engine.stats().schedule)

    @contextmanager
    def lease(self, choice: Choice) -> Iterator[AdapterRef]:
        """The version that is meant now; it cannot be forgotten while the block runs.

        Raises:
            UnknownModelError: nothing has that name; there is no falling back to the base.
        """
        with ExitStack() as held:
            with naming(choice.param, choice.selector or ""):
                ref = held.enter_context(self.adapters.lease(choice.selector))
            yield ref

    def find(self, selector: str, param: str) -> AdapterCard:
        """Raises UnknownModelError, naming `param`: no adapter has that name."""
        with naming(param, selector):
            return self.adapters.find(selector)

    def is_base(self, model: str | None) -> bool:
        """Whether `model` is left out, or names the model itself."""
        return model in (None, self.card.name, BASE_ADAPTER.name)

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is left out, or names what is served."""
        if name is not None and not self.is_base(name):
            self.find(name, "model")

    def check_trains(self) -> None:
        """Raises TrainingDisabledError where the server does not train."""
        if not self.training.status().enabled:
            refuse_training()

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
