"""`Services`: what routes use, in one object on `app.state.services`, and the dependencies that routes get it by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from fastapi import Depends
from starlette.requests import Request

from mlx_parallm.adapters.cards import AdapterCard
from mlx_parallm.config import Mode
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.machine import Relief
from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.trajectories import CollectingClient
from mlx_parallm.errors import (
    ConflictError,
    InvalidRequestError,
    RoleError,
    TrainingDisabledError,
    UnknownModelError,
)
from mlx_parallm.rl.status import TrainingStatus
from mlx_parallm.server.access import ANYONE, KeyRing, NamedKey, Role, Sessions
from mlx_parallm.server.api.histories import EpisodeHistories
from mlx_parallm.server.api.responses.store import ResponseStore
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.errors import AsleepError, DrainingError, InferenceDisabledError, ShortMemoryError
from mlx_parallm.server.limits import Accounts, SequenceGate, Workers
from mlx_parallm.server.metrics import ServerMetrics
from mlx_parallm.server.request import AdapterSelector, ModelNames, adapter_named_by
from mlx_parallm.server.request_log import RequestRecord, record_of
from mlx_parallm.server.views import SeenAdapters, SeenModels

if TYPE_CHECKING:
    from mlx_parallm.rl.service import TrainingService

T = TypeVar("T")

_SLEEP_CHECK_S = 0.05
DOES_NOT_TRAIN = "This server does not train; start it with --enable-rl-training."


class Lifecycle:
    """Whether the server accepts requests, and what ends those under way. Used on the event loop's thread, or from a
    signal handler.

        asleep ⇄ serving → draining → expired

    Asleep: generation requests are refused. Draining: requests under way continue, also streamed answers; new
    generation requests and `/ready` get 503; the streams of `/v1/training/events`, which never end by themselves, are
    closed. Expired: the time limit is over, and requests under way get an error.
    """

    def __init__(self, engine: EngineClient, gate: SequenceGate) -> None:
        self.asleep = False
        self.drain_begun = asyncio.Event()
        self.expired = asyncio.Event()
        self._engine = engine
        self._gate = gate
        self._work: set[asyncio.Task[Any]] = set()
        self._falling_asleep: set[asyncio.Task[None]] = set()

    @property
    def working(self) -> bool:
        """Whether work begun by `run_to_end` has not ended yet."""
        return bool(self._work)

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`, which runs to its end even if the client disconnects meanwhile.

        Raises:
            DrainingError: the server is draining; `work` was not started.
        """
        if self.drain_begun.is_set():
            work.close()
            raise DrainingError("draining")
        return await asyncio.shield(_kept(work, self._work))

    def begin_drain(self) -> None:
        self.drain_begun.set()

    def expire(self) -> None:
        self.drain_begun.set()
        self.expired.set()

    async def sleep(self, free_adapters: bool) -> None:
        """Refuses requests at once, waits for those under way, then frees the KV cache, and also the adapter slots if
        `free_adapters`. Returns when that is done, or when `wake` was called first.

        Raises:
            EngineDeadError: the device thread is not running.
        """
        self.asleep = True
        task = _kept(self._free_memory(free_adapters), self._falling_asleep)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    def wake(self) -> None:
        """Accepts requests again. The first one that needs the memory allocates it."""
        self.asleep = False
        for task in self._falling_asleep:
            task.cancel()

    async def _free_memory(self, free_adapters: bool) -> None:
        while self._gate.held:  # includes requests that have not reached the engine yet
            await asyncio.sleep(_SLEEP_CHECK_S)
        await self._engine.sleep(free_adapters)


def _kept(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """A task that does the work, and is one of `tasks` until it has ended."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


@dataclass(frozen=True, kw_only=True)
class Services(Backend):
    """What routes use: the backend, as the key of a request sees it, and what the server has of its own.

    `key` is the one that the request was let in with. `started_at` is Unix time in seconds. `schedule_lock` is held
    while the schedule is changed, so that each change starts from the one before.
    """

    gate: SequenceGate
    lifecycle: Lifecycle
    metrics: ServerMetrics
    workers: Workers
    ring: KeyRing
    accounts: Accounts
    sessions: Sessions
    key: NamedKey = ANYONE
    responses: ResponseStore = field(default_factory=ResponseStore)
    histories: EpisodeHistories = field(default_factory=EpisodeHistories)
    schedule_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    started_at: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, backend: Backend) -> Self:
        """The services of a new server, for requests that need no key."""
        config, cluster = backend.config, backend.cluster
        gate = SequenceGate(config.max_batch_size + config.max_queued)
        secret = None if config.api_key is None else config.api_key.get_secret_value()
        ring = KeyRing(secret, config.keys_file, None if cluster is None else cluster.client.token)
        accounts = Accounts(ring)
        return cls(
            **vars(backend),
            gate=gate,
            lifecycle=Lifecycle(backend.engine, gate),
            metrics=ServerMetrics(backend, gate, accounts),
            workers=Workers(config.body_timeout, config.max_body_bytes),
            ring=ring,
            accounts=accounts,
            sessions=Sessions(ring),
        )

    def seen_by(self, key: NamedKey) -> Self:
        """The same as this key sees it; see `views`. What trains gets the key's reader with each call."""
        if key.adapters is None:
            return replace(self, key=key)
        adapters = SeenAdapters(self.adapters, key, sorted(self.models.first.names))
        return replace(self, key=key, adapters=adapters, models=SeenModels(self.models, adapters, key))

    def path(self, text: str) -> str:
        """A path of this machine for keys that may name one, those of `train`; empty for others."""
        return text if self.key.role.allows(Role.TRAIN) else ""

    @property
    def model_names(self) -> ModelNames:
        """The values of the field `model` that mean a base model and no adapter."""
        return ModelNames(self.models.names, self.config.model_aliases)

    def model_for(self, *names: str | None) -> AbstractAsyncContextManager[ServedModel]:
        """The base model that the first of these names means which is not None, loaded until the block ends. The names
        are of base models or adapters; see `core.BaseModels.find`."""
        return self.models.use(self.models.find(*names))

    def check_open(self) -> None:
        """Checks that the server accepts generation requests now.

        Raises:
            DrainingError: it is shutting down.
            InferenceDisabledError: it only trains.
            AsleepError: it is asleep.
            EngineDeadError: the device thread, which runs the model, has stopped.
            ShortMemoryError: the machine is short of memory.
        """
        if self.lifecycle.drain_begun.is_set():
            raise DrainingError("draining")
        if self.config.mode is Mode.TRAINING_ONLY:
            raise InferenceDisabledError("training only")
        if self.lifecycle.asleep:
            raise AsleepError("asleep")
        stats = self.engine.stats()
        stats.check_works()
        if stats.machine.relief is Relief.REQUESTS:
            raise ShortMemoryError(stats.machine.shortage)

    async def adapter_name(self, selector: AdapterSelector, base: str, record: RequestRecord) -> str | None:
        """What `AdapterClient.lease` needs for a request of a base model: the name that it has, or that of a folder's
        adapter, which is loaded if it is not, or if its files were written since. Only of the first base model can
        there be a default adapter. To load a folder is a control action, which `record` notes.

        Raises:
            RoleError: the folder is not loaded, and the key may not load it.
            InvalidRequestError: the folder cannot be loaded; the error names the field `adapters` if that has it.
        """
        folder = selector.folder
        if selector.name is None and base != self.models.first.card.name:
            return BASE_ADAPTER.name
        if folder is None and (selector.name is not None or not self.adapters.has_default_folder):
            return selector.name
        if folder is not None:
            loaded = await self.adapters.loaded_folder(folder)
            record.controls, live = loaded is None, None if loaded is None else self.adapters.find(loaded).ref
            if not self.key.role.allows(Role.TRAIN):
                if loaded is None:
                    raise RoleError.needing(Role.TRAIN, self.key.role, "Loading an adapter by its path", selector.param)
                return loaded
        loading = self.adapters.default_name() if folder is None else self.adapters.load_folder(folder)
        try:
            name = await self.lifecycle.run_to_end(loading)
        except InvalidRequestError as error:
            raise type(error)(str(error), param=selector.param) from None
        if folder is not None and name is not None:  # its files may have been written again
            record.controls = live is None or self.adapters.find(name).ref != live
        return name

    def find(self, selector: str, param: str) -> AdapterCard:
        """The card of an adapter version. Raises UnknownModelError, naming `param`, if `selector` names none."""
        with adapter_named_by(param, selector):
            return self.adapters.find(selector)

    def routed_adapter(self) -> AdapterRef | None:
        """The version with the largest share of the requests that name no adapter. None: the base model, or none that
        the key sees."""
        route = self.adapters.route()
        selector = max(route, key=lambda name: route[name], default=BASE_ADAPTER.name)
        return None if selector == BASE_ADAPTER.name else self.adapters.find(selector).ref

    def is_base(self, model: str | None) -> bool:
        """Whether `model` is left out or names the first base model, and the key sees that."""
        first = ModelNames(self.models.first.names, self.config.model_aliases)
        return model is None or (self.sees_base and (model in first or model == BASE_ADAPTER.name))

    @property
    def sees_base(self) -> bool:
        """Whether the key may use base models without an adapter."""
        return self.key.sees(BASE_ADAPTER.name)

    def check_may_change(self, selector: str | None) -> None:
        """Raises RoleError: the selector names an adapter that another key trains with Tinker."""
        name = (selector or "").partition("@")[0]
        if self.key.sees(name) and not self.key.may_change(name):
            raise RoleError(f"{name} belongs to another key, which trains it with Tinker: only that key may change it.")

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModelError unless `name` is left out or names a base model or an adapter."""
        if name is None or self.is_base(name) or (self.sees_base and name in self.models.names):
            return
        if not any(name in status.adapters for status in self.models.statuses()):
            self.find(name, "model")

    def base_called(self, name: str | None, param: str) -> str | None:
        """The base model that a request field means by one of its names; None if the field is left out.

        Raises:
            UnknownModelError: no base model has the name.
        """
        if name is None:
            return None
        if name not in self.models.names:
            bases = self.models.statuses() if self.sees_base else ()
            known = f"; there are: {', '.join(status.name for status in bases)}" if bases else ""
            raise UnknownModelError(f"{param}: no base model here is called {name!r}{known}.", param=param)
        return self.models.first.card.name if name in self.models.first.names else name

    def training_statuses(self) -> Sequence[TrainingStatus]:
        """See `rl.service.TrainingService.statuses`, for the key; empty if the server does not train."""
        return [] if self.training is None else self.training.statuses(reader=self.key.reader)

    def is_trained(self, name: str) -> bool:
        """Whether an adapter that the key sees is in training."""
        return any(name == status.adapter for status in self.training_statuses())

    def check_not_trained(self, selector: str | None, instead: str) -> None:
        """Raises ConflictError if the selector names an adapter in training. `instead`: what to do."""
        name = (selector or "").partition("@")[0]
        if self.is_trained(name):
            raise ConflictError(f"{name!r} is in training here: {instead}", param="lora_name")

    def require_training(self, param: str | None = None) -> TrainingService:
        """The training client. Raises TrainingDisabledError, naming `param`, if the server does not train."""
        if self.training is None:
            raise TrainingDisabledError(DOES_NOT_TRAIN, param=param)
        return self.training

    def require_collection(self, param: str | None = None) -> CollectingClient:
        """Where requests to be collected go. Raises TrainingDisabledError, naming `param`, if nothing trains."""
        if self.collection is None:
            raise TrainingDisabledError(DOES_NOT_TRAIN, param=param)
        return self.collection

    def require_extra(self, name: str) -> Any:
        """See `Backend.extra`. Raises TrainingDisabledError if the extra is not there, as the server does not train."""
        extra = self.extra(name)
        if extra is None:
            raise TrainingDisabledError(DOES_NOT_TRAIN)
        return extra


async def services_of(request: Request) -> Services:
    """The services of the app, for the key of this request."""
    services: Services = request.app.state.services
    key = record_of(request.scope).key
    return services if key is None else services.seen_by(key)  # probes and the login page need no key


ServicesDep = Annotated[Services, Depends(services_of)]


async def training_of(services: ServicesDep) -> TrainingService:
    return services.require_training()


async def collection_of(services: ServicesDep) -> CollectingClient:
    return services.require_collection()


CollectionDep = Annotated[CollectingClient, Depends(collection_of)]
"""Where rewards go, for routes that answer 409 if nothing trains."""


TrainingDep = Annotated["TrainingService", Depends(training_of)]
"""The training client, for routes that answer 409 if the server does not train."""
