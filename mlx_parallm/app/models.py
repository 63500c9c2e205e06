"""The base models of a server, of which requests load the ones that they need.

    request ──▶ use() ──▶ loaded: it is used at once
                  └─────▶ not loaded: waits ──▶ others give way ──▶ load ──▶ all that wait for it are admitted together

Residency     decides which base model gives way to another one, and when. Pure decisions, in bytes and seconds
DeviceLoader  loads base models onto the device thread, and unloads them
BaseSet       the base models for routes. One task loads and unloads, one base model at a time: first the one whose
              request has waited longest
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlx_parallm.adapters.service import has_adapter
from mlx_parallm.app.all_adapters import AllAdapters
from mlx_parallm.app.base_model import BaseModel, weight_bytes
from mlx_parallm.app.base_paths import base_of_adapter, bases_of_adapter
from mlx_parallm.app.build import RunningEngine
from mlx_parallm.app.device import SharedDevice, room_for_weights
from mlx_parallm.config import human_bytes
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.models import GENERIC_NAME, BaseStatus, ModelState, ServedModel
from mlx_parallm.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    ModelUnavailableError,
    ParaLLMError,
    QueueTimeoutError,
    UnknownModelError,
)
from mlx_parallm.extras_table import needed
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.rl.deletion import Deletion
from mlx_parallm.tasks import spawn

# ---- which one gives way ------------------------------------------------------------------------------

TURN = 4.0
"""Length of a turn, as a multiple of the time that loading the base model took."""

GRACE_S = 1.0
"""A base model without requests is kept for so many seconds within its turn, because clients ask again at once; or for
the time that it took to load, if that is less."""


@dataclass(eq=False, slots=True)
class ResidentModel:
    """A base model, in memory or not. Times are in seconds of `time.monotonic`.

    Attributes:
        pinned: it never gives way.
        leaving: it gives way as soon as its requests have ended; new ones wait.
        users: requests that use it.
        used_at: when the last of them ended.
    """

    name: str
    pinned: bool = False
    loaded: bool = False
    leaving: bool = False
    weight_bytes: int = 0
    users: int = 0
    used_at: float = 0.0
    loaded_at: float = 0.0
    load_seconds: float = 0.0

    def may_leave_at(self) -> float:
        """When it may begin to give way to a base model that waits."""
        turn_ends = self.loaded_at + TURN * self.load_seconds
        return turn_ends if self.users else min(turn_ends, self.used_at + min(GRACE_S, self.load_seconds))


class Residency:
    """Decides for all base models of a process.

    A base model that is asked for is kept for some time after it was loaded by those who use it, so that a client who
    alternates between base models cannot make the others wait for loads all the time. This turn is a multiple of the
    time that the load took, so loading takes a bounded share of all time. A base model that nobody uses any more need
    not wait for the end of its turn.

    Args:
        room_bytes: memory for the weights of all that are loaded.
    """

    def __init__(self, residents: Sequence[ResidentModel], room_bytes: int) -> None:
        self._residents = residents
        self.room_bytes = room_bytes

    def missing(self, wanted: ResidentModel) -> int:
        """Bytes that others have to give up before `wanted` can be loaded; 0 or less if none."""
        return wanted.weight_bytes + sum(each.weight_bytes for each in self._loaded()) - self.room_bytes

    def fits(self, wanted: ResidentModel) -> bool:
        """Whether `wanted` could be loaded if all others gave way that may."""
        pinned = sum(each.weight_bytes for each in self._loaded() if each.pinned)
        return wanted.weight_bytes + pinned <= self.room_bytes

    def next_to_leave(self, now: float) -> ResidentModel | None:
        """The base model that gives way next: of those without requests the least recently used one; else one that is
        leaving already; else the one that was loaded first. None if none may leave yet."""
        free = [each for each in self._loaded() if not each.pinned and each.may_leave_at() <= now]
        unused = [each for each in free if not each.users]
        if unused:
            return min(unused, key=lambda each: each.used_at)
        return min(free, key=lambda each: (not each.leaving, each.loaded_at), default=None)

    def ask_again_at(self) -> float | None:
        """When `next_to_leave` will have an answer if nothing changes; None if only a change can bring one."""
        return min((each.may_leave_at() for each in self._loaded() if not each.pinned), default=None)

    def unused_since(self, before: float) -> ResidentModel | None:
        """A base model that nobody has used since `before`."""
        unused = (each for each in self._loaded() if not (each.pinned or each.users) and each.used_at <= before)
        return next(unused, None)

    def unused_longest(self) -> float | None:
        """Since when nobody has used the base model that was used least recently; None if all are in use."""
        return min((each.used_at for each in self._loaded() if not (each.pinned or each.users)), default=None)

    def _loaded(self) -> list[ResidentModel]:
        return [each for each in self._residents if each.loaded]


# ---- loading and unloading --------------------------------------------------------------------------


class DeviceLoader:
    """Loads and unloads base models. Every method but `owner` may raise EngineDeadError.

    Args:
        on_disk: names of the adapters in the adapter folder, by base model.
        templates: see `core.ServedModel`.
    """

    def __init__(
        self,
        bases: Sequence[BaseModel],
        shared: SharedDevice,
        on_disk: Mapping[str, tuple[str, ...]],
        templates: Mapping[str, str],
    ) -> None:
        self._templates = templates
        self._bases = {base.name: base for base in bases}
        self._processor = shared.processor
        self._on_disk = on_disk
        self._grammars: dict[str, LLCompiler] = {}

    async def weigh(self, base: str) -> int:
        """The bytes that the weights will take. Takes no memory for them. Raises ModelError."""
        model = self._bases[base]
        return await self._processor.run(lambda: weight_bytes(model.open()))

    async def load(self, base: str) -> ServedModel:
        """Loads a base model. Raises ModelError, ConfigError, or the device's error."""
        model = self._bases[base]
        await self._processor.load(model.loading())
        return self.served(base)

    async def unload(self, base: str) -> None:
        """Unloads a base model that nobody uses, and frees its memory. Raises the device's error; it is unloaded then
        too, as far as that went."""
        await self._processor.unload(base)

    def served(self, base: str) -> ServedModel:
        """A base model that was loaded, as routes see it."""
        model = self._bases[base]
        if base not in self._grammars:
            self._grammars[base] = LLCompiler(model.tokenizer, model.card.vocab_size)
        names = frozenset({*model.card.names, *((GENERIC_NAME,) if model.first else ())})
        return ServedModel(model.card, model.tokenizer, self._grammars[base], names, self._templates)

    def owner(self, adapter: str) -> str | None:
        """The base model of an adapter. None if no adapter has this name."""
        return next((base for base in self._bases if self._has(base, adapter)), None)

    def _has(self, base: str, adapter: str) -> bool:
        model = self._bases[base]
        if not model.described:
            return adapter.partition("@")[0] in self.adapters_on_disk(base)
        try:
            model.adapters.find(adapter)
        except UnknownModelError:
            return False
        return True

    def adapters_on_disk(self, base: str) -> tuple[str, ...]:
        """Names of the adapters of a base model that was never loaded."""
        return self._on_disk.get(base, ())


def build_base_set(
    engine: RunningEngine, templates: Mapping[str, str], deletion: Deletion
) -> tuple[BaseSet, AllAdapters]:
    """The base models and all their adapters, for routes. The first base model is loaded. `templates`: see
    `core.ServedModel`. `deletion`: see `AllAdapters`. Blocks on the disk."""
    config, shared, first = engine.config, engine.shared, engine.bases[0]
    loader = DeviceLoader(engine.bases, shared, _adapters_by_base(config.adapters.adapter_dir, shared), templates)
    residents, now = [ResidentModel(base.name) for base in engine.bases], time.monotonic()
    is_split = shared.parts.split is not None  # the other ranks do not load again
    residents[0].loaded, residents[0].pinned = True, config.rl_training.enabled or is_split
    residents[0].loaded_at, residents[0].used_at, residents[0].load_seconds = now, now, engine.load_seconds
    residents[0].weight_bytes = first.card.weight_bytes
    room = max(room_for_weights(shared.budget, config), first.card.weight_bytes)
    idle, timeout = config.model.idle_unload, config.server.queue_timeout
    models = BaseSet(loader.served(first.name), residents, room, loader, idle, timeout)
    bases_of = partial(bases_of_adapter, bases=shared.bases)
    allowed = config.adapters.allowed_hub_adapters
    hub = needed("hub", "--allowed-hub-adapters").AllowedAdapters(allowed) if allowed else None
    return models, AllAdapters(engine.bases, models, loader.owner, bases_of, deletion, hub)


def _adapters_by_base(folder: Path | None, shared: SharedDevice) -> dict[str, tuple[str, ...]]:
    """The names of the adapters in the adapter folder, by the base model that their files name. Blocks on the disk."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(folder.iterdir()) if folder is not None else ():
        if has_adapter(path):
            base = base_of_adapter(path, shared.bases)
            found[base] = (*found.get(base, ()), path.name)
    return found


# ---- for routes -------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

RETRY_S = 30.0
"""After a load has failed, requests for the base model fail with the same error for so many seconds."""


class BaseSet:
    """Implements `core.BaseModels`.

    Args:
        first: the first base model, which is loaded.
        residents: all base models, the first one first.
        idle_unload_s: a base model that was not used for so long is unloaded; None: never.
        queue_timeout_s: longest time that a request waits for its base model; None: no limit.
    """

    def __init__(
        self,
        first: ServedModel,
        residents: Sequence[ResidentModel],
        room_bytes: int,
        loader: DeviceLoader,
        idle_unload_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> None:
        self.first = first
        self._residents = {resident.name: resident for resident in residents}
        self._residency = Residency(residents, room_bytes)
        self._loader = loader
        self._idle_unload_s, self._queue_timeout_s = idle_unload_s, queue_timeout_s
        self._served: dict[str, ServedModel] = {first.card.name: first}
        self._waiters: dict[str, dict[asyncio.Future[None], float]] = {name: {} for name in self._residents}
        self._failures: dict[str, tuple[float, str]] = {}  # when a load failed, and why
        self._loading: str | None = None
        self._changed = asyncio.Event()

    # -- names -----------------------------------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """See `core.BaseModels.names`."""
        return self.first.names | frozenset(self._residents)

    def find(self, *names: str | None) -> str:
        """See `core.BaseModels.find`."""
        found = [(name, owner) for name in names if name is not None and (owner := self._owner(name)) is not None]
        if not found:
            return self.first.card.name
        (first_name, base), *others = found
        for name, other in others:
            if other != base:
                raise InvalidRequestError(f"{name!r} belongs to the base model {other}, and {first_name!r} to {base}.")
        return base

    def _owner(self, name: str) -> str | None:
        if name == BASE_ADAPTER.name:
            return None
        if name in self.first.names:
            return self.first.card.name
        return name if name in self._residents else self._loader.owner(name)

    # -- requests --------------------------------------------------------------------------------

    def is_ready(self, base: str) -> bool:
        """See `core.BaseModels.is_ready`."""
        resident = self._residents[base]
        return resident.loaded and not resident.leaving

    @asynccontextmanager
    async def use(self, base: str) -> AsyncIterator[ServedModel]:
        """See `core.BaseModels.use`."""
        resident = self._residents[base]
        if self.is_ready(base):
            resident.users += 1
        else:
            await self._admitted(resident)
        try:
            yield self._served[base]
        finally:
            self._release(resident)

    async def _admitted(self, resident: ResidentModel) -> None:
        """Waits until `_admit` has counted this request as a user."""
        self._check_not_failed(resident.name)
        waiters, waiter = self._waiters[resident.name], asyncio.get_running_loop().create_future()
        waiters[waiter] = time.monotonic()
        self._changed.set()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await waiter
        except BaseException as error:  # the client has left, or time is up: this request is no user
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(resident)
            if isinstance(error, TimeoutError):
                waited = f"{self._queue_timeout_s:.0f} s"
                raise QueueTimeoutError(f"The request waited {waited} for the base model {resident.name}.") from None
            raise
        finally:
            waiters.pop(waiter, None)
            self._changed.set()

    def _check_not_failed(self, base: str) -> None:
        at, why = self._failures.get(base, (0.0, ""))
        if why and time.monotonic() - at < RETRY_S:
            raise ModelUnavailableError(why)

    def _release(self, resident: ResidentModel) -> None:
        resident.users -= 1
        resident.used_at = time.monotonic()
        self._changed.set()

    def _admit(self, resident: ResidentModel) -> None:
        """Lets all requests use a base model that wait for it."""
        for waiter in self._waiters[resident.name]:
            if not waiter.done():
                resident.users += 1
                waiter.set_result(None)

    # -- loading and unloading -------------------------------------------------------------------

    @asynccontextmanager
    async def kept_up(self) -> AsyncIterator[None]:
        """Loads and unloads base models while the block runs."""
        task = spawn(self._run(), _log, "loading and unloading base models")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def close(self) -> None:
        """See `core.BaseModels.close`."""
        for served in self._served.values():
            served.grammars.close()

    async def _run(self) -> None:
        with suppress(EngineDeadError):  # the server ends then
            await self._keep_up()

    async def _keep_up(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            if (wanted := self._longest_waiting()) is not None:
                await self._bring_in(wanted)
            elif (unused := self._unused(now)) is not None:
                await self._unload(unused)
            else:
                since = None if self._idle_unload_s is None else self._residency.unused_longest()
                await self._wait(None if since is None else since + (self._idle_unload_s or 0.0))

    def _unused(self, now: float) -> ResidentModel | None:
        return None if self._idle_unload_s is None else self._residency.unused_since(now - self._idle_unload_s)

    def _longest_waiting(self) -> ResidentModel | None:
        unloaded = [resident for resident in self._residents.values() if not resident.loaded]
        since = {resident: min(arrived) for resident in unloaded if (arrived := self._arrivals(resident))}
        return min(since, key=lambda resident: since[resident], default=None)

    def _arrivals(self, resident: ResidentModel) -> list[float]:
        """When the requests came that wait for this base model."""
        return [arrived for waiter, arrived in self._waiters[resident.name].items() if not waiter.done()]

    async def _wait(self, until: float | None) -> None:
        """Waits for a change, or until a time."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if until is None else max(until - time.monotonic(), 0.0)):
                await self._changed.wait()

    async def _bring_in(self, wanted: ResidentModel) -> None:
        """Loads a base model for the requests that wait for it, after others have given way. If that fails, these
        requests fail."""
        self._loading = wanted.name
        try:
            if await self._make_room(wanted):
                await self._load(wanted)
                self._admit(wanted)
        except Exception as error:  # noqa: BLE001 - a file or the device: it concerns the requests for this model only
            self._fail(wanted, error)
        finally:
            self._loading = None
            self._keep(each for each in self._residents.values() if each.leaving)

    async def _make_room(self, wanted: ResidentModel) -> bool:
        """Has others give way until `wanted` fits. False if nobody waits for it any more.

        Raises:
            ModelUnavailableError: it does not fit, even if every base model that may be unloaded is.
        """
        wanted.weight_bytes = wanted.weight_bytes or await self._loader.weigh(wanted.name)
        if not self._residency.fits(wanted):
            room = human_bytes(max(self._residency.room_bytes, 0))
            raise ModelUnavailableError(
                f"it has {human_bytes(wanted.weight_bytes)} of weights, and beside the KV cache there is room for "
                f"{room}, also for base models that stay loaded. The operator can lower --kv-cache-memory or raise "
                "--mlx-memory-limit."
            )
        while self._residency.missing(wanted) > 0:
            if not self._arrivals(wanted):
                return False
            leaving = self._residency.next_to_leave(time.monotonic())
            if leaving is None:
                await self._wait(self._residency.ask_again_at())
            elif leaving.users:
                leaving.leaving = True
                await self._wait(None)
            else:
                await self._unload(leaving)
        return True

    async def _load(self, wanted: ResidentModel) -> None:
        started = time.monotonic()
        self._served[wanted.name] = await self._loader.load(wanted.name)
        now = time.monotonic()
        wanted.loaded, wanted.loaded_at, wanted.used_at, wanted.load_seconds = True, now, now, now - started
        self._failures.pop(wanted.name, None)
        _log.info("loaded the base model %s in %.1f s", wanted.name, now - started)

    async def _unload(self, resident: ResidentModel) -> None:
        resident.leaving = True  # new requests wait
        try:
            await self._loader.unload(resident.name)
            _log.info("unloaded the base model %s", resident.name)
        except EngineDeadError:
            raise
        except Exception:  # noqa: BLE001 - the device: this base model takes no requests, and may be loaded again
            _log.exception("the base model %s was not unloaded as a whole", resident.name)
        resident.loaded, resident.leaving = False, False

    def _keep(self, residents: Iterable[ResidentModel]) -> None:
        """Base models that were to give way, and are loaded still, take requests again."""
        for resident in residents:
            resident.leaving = False
            self._admit(resident)

    def _fail(self, wanted: ResidentModel, error: Exception) -> None:
        why = f"The base model {wanted.name} cannot be loaded: {_reason(error)}"
        if not isinstance(error, EngineDeadError):
            _log.error("the base model %s cannot be loaded: %s", wanted.name, error, exc_info=_unexpected(error))
        self._failures[wanted.name] = (time.monotonic(), why)
        for waiter in self._waiters[wanted.name]:
            if not waiter.done():
                waiter.set_exception(ModelUnavailableError(why))

    # -- state -----------------------------------------------------------------------------------

    def statuses(self) -> tuple[BaseStatus, ...]:
        """See `core.BaseModels.statuses`."""
        return tuple(map(self._status, self._residents.values()))

    def _status(self, resident: ResidentModel) -> BaseStatus:
        name, served = resident.name, self._served.get(resident.name)
        on_disk = () if served else self._loader.adapters_on_disk(name)
        _, error = self._failures.get(name, (0.0, ""))
        return BaseStatus(name, self._state(resident), served.card if served else None, on_disk, error)

    def _state(self, resident: ResidentModel) -> ModelState:
        if resident.loaded:
            return ModelState.LEAVING if resident.leaving else ModelState.LOADED
        if self._arrivals(resident) or self._loading == resident.name:
            return ModelState.LOADING
        return ModelState.FAILED if resident.name in self._failures else ModelState.IDLE


def _reason(error: Exception) -> str:
    """Why a base model cannot be loaded, for clients. It names no path."""
    if isinstance(error, ModelUnavailableError | EngineDeadError):
        return str(error)
    if isinstance(error, ModelNotFoundError):
        return "its files are gone."
    return "the server's log says why."


def _unexpected(error: Exception) -> Exception | None:
    """The error if it is logged with its traceback."""
    return None if isinstance(error, ParaLLMError) else error
