"""BaseSet: the base models of a server, of which requests load the ones that they need.

    request ──▶ use() ──▶ loaded: it is used at once
                  └─────▶ not loaded: waits ──▶ others give way ──▶ load ──▶ all that wait for it are admitted together

One task loads and unloads, one base model at a time: first the one whose request has waited longest. `Residency` says
who gives way and when.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from mlx_parallm.app.residency import Residency, ResidentModel
from mlx_parallm.config import human_bytes
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.models import BaseStatus, ModelState, ServedModel
from mlx_parallm.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    ModelUnavailableError,
    ParaLLMError,
    QueueTimeoutError,
)
from mlx_parallm.tasks import spawn

if TYPE_CHECKING:
    from mlx_parallm.app.base_loader import DeviceLoader

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
        await self._loader.unload(resident.name)
        resident.loaded, resident.leaving = False, False
        _log.info("unloaded the base model %s", resident.name)

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
