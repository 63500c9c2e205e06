"""ContinuousBatchProcessor: the device thread, and the asyncio face on it.

    event loop                      device thread
    generate() ──submit──▶ inbox ──▶ DeviceLoop.step(), again and again
        ▲                               │
        └── one asyncio.Queue a request ◀─ call_soon_threadsafe(events of one unit)

The two threads share nothing else: requests and events are frozen, arrays never leave the device thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import mlx.core as mx

from mlx_parallm.core import (
    DeviceSchedule,
    EngineStats,
    Event,
    GenerationRequest,
    PauseMode,
    RequestFailed,
    RequestFinished,
)
from mlx_parallm.engine.loop import DeviceLoop, EngineParts
from mlx_parallm.errors import EngineDeadError

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_ALIVE_CHECK_S = 1.0
_DRAIN_CHECK_S = 0.05
_SNAPSHOT_S = 0.1
"""Age at which a busy loop renews the snapshot that `stats` returns."""


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    """`run` is called on the device thread between two units; `fail` gets what it raises."""

    run: Callable[[DeviceLoop], None]
    fail: Callable[[Exception], None]


class _Wake:
    """Makes an idle loop look for work again."""


class _Stop:
    """Ends the device thread."""


_Message = GenerationRequest | _Abort | _Call | _Wake | _Stop


class ContinuousBatchProcessor:
    """Implements `core.EngineClient` and `core.DeviceThread`.

    Args:
        build: makes the parts, model included. Runs on the device thread, because MLX arrays belong to
            the thread that makes them.
        debug: check every book when idle; a disagreement kills the device thread, loudly.
    """

    def __init__(self, build: Callable[[], EngineParts], debug: bool = False) -> None:
        self._build = build
        self._debug = debug
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._pauses = 0  # calls of `pause` and `resume`: the last one counts
        self._stats = EngineStats(alive=True, ready=False)
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    # -- any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the device thread and waits until the model is loaded. Raises what the build raised."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self._thread.join()  # it has MLX's streams to put away before the process may end
            raise self._start_error

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the device thread after its current unit; running requests fail."""
        self._inbox.put(_Stop())
        self._thread.join(timeout_s)

    def stats(self) -> EngineStats:
        return self._stats

    def wake(self) -> None:
        """Makes an idle loop look for work again."""
        self._inbox.put(_Wake())

    # -- the event loop's thread -----------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Yields the request's events; see `core.EngineClient.generate`."""
        self._event_loop = asyncio.get_running_loop()
        if not self._stats.alive:
            raise EngineDeadError("the device thread has stopped; restart the server")
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._queues[request.request_id] = events
        self._inbox.put(request)
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = isinstance(event, RequestFinished | RequestFailed)
                yield event
        finally:
            del self._queues[request.request_id]
            if not ended:
                self._inbox.put(_Abort(request.request_id))

    async def reschedule(self, schedule: DeviceSchedule) -> None:
        """See `core.EngineClient.reschedule`."""
        await self._change(lambda loop: loop.reschedule(schedule))

    async def pause(self, mode: PauseMode) -> None:
        """See `core.EngineClient.pause`."""
        self._pauses += 1
        mine, under_way = self._pauses, set(self._queues)
        await self._change(lambda loop: loop.pause(mode))
        while mode is PauseMode.WAIT and mine == self._pauses and under_way & self._queues.keys():
            await asyncio.sleep(_DRAIN_CHECK_S)

    async def resume(self) -> None:
        """See `core.EngineClient.resume`."""
        self._pauses += 1
        await self._change(DeviceLoop.resume)

    async def sleep(self, bank: bool = False) -> None:
        """See `core.EngineClient.sleep`."""
        while self._queues:
            await asyncio.sleep(_DRAIN_CHECK_S)
        if bank:
            await self._vacate()
        await self._change(lambda _: mx.clear_cache())

    async def _vacate(self) -> None:
        error: Exception | None = await self._told(lambda loop, tell: loop.vacate(tell))
        if error is not None:
            raise error

    async def on_device(self, start: Callable[[Callable[[_T], None]], None]) -> _T:
        """See `core.DeviceThread.on_device`."""
        return await self._told(lambda _, tell: start(tell))

    async def _change(self, change: Callable[[DeviceLoop], None]) -> None:
        """Runs `change` on the device thread between two units, and returns when `stats` shows it."""

        def run(loop: DeviceLoop, tell: Callable[[None], None]) -> None:
            change(loop)
            self._stats = loop.stats()
            tell(None)

        await self._told(run)

    async def _told(self, start: Callable[[DeviceLoop, Callable[[_T], None]], None]) -> _T:
        """Runs `start(loop, tell)` on the device thread, and waits for what it tells, then or later. Raises what it
        raises."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[_T] = loop.create_future()

        def settle(set_it: Callable[[], None]) -> None:
            if not told.done():  # else nobody waits any more
                set_it()

        def tell(result: _T) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, lambda: told.set_result(result))

        def fail(error: Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, lambda: told.set_exception(error))

        self._inbox.put(_Call(lambda device_loop: start(device_loop, tell), fail))
        while not told.done():
            if not self._stats.alive:
                raise EngineDeadError("the device thread has stopped; restart the server")
            await asyncio.wait([told], timeout=_ALIVE_CHECK_S)
        return told.result()

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        for request_id, event in events:
            if (listener := self._queues.get(request_id)) is not None:
                listener.put_nowait(event)

    def _fail_all(self, error: EngineDeadError) -> None:
        for listener in self._queues.values():
            listener.put_nowait(RequestFailed(error))

    # -- the device thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._build_and_serve()
        finally:
            mx.clear_streams()  # MLX wants each thread that used it to do this before it ends

    def _build_and_serve(self) -> None:
        try:
            loop = DeviceLoop(self._build(), self._publish)
            self._stats = loop.stats()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that called start(), which raises it
            self._start_error = error
            self._stats = EngineStats(alive=False, ready=False)
            return
        finally:
            self._started.set()
        try:
            self._serve(loop)
        except Exception:  # noqa: BLE001 - the device is lost, or the books cannot be trusted: stop, and say so
            _log.exception("the device thread failed")
        finally:
            self._stats = replace(self._stats, alive=False, ready=False)
            self._call_soon(self._fail_all, EngineDeadError("the device thread has stopped; restart the server"))

    def _serve(self, loop: DeviceLoop) -> None:
        taken_at, busy = 0.0, True
        while self._take_messages(loop, wait_s=0.0 if busy else _IDLE_WAIT_S):
            busy = loop.step()
            now = time.monotonic()
            if not busy or now - taken_at > _SNAPSHOT_S:
                with loop.surviving():
                    loop.fail_overdue(now)
                    self._stats, taken_at = loop.stats(), now
            if self._debug and not busy:
                loop.check_integrity()

    def _take_messages(self, loop: DeviceLoop, wait_s: float) -> bool:
        """Hands over what has arrived, waiting up to `wait_s` for a first message; False when told to stop."""
        try:
            message = self._inbox.get(block=wait_s > 0.0, timeout=wait_s or None)
            while not isinstance(message, _Stop):
                if isinstance(message, _Abort):
                    loop.abort(message.request_id)
                elif isinstance(message, _Call):
                    _run(message, loop)
                elif isinstance(message, GenerationRequest):
                    loop.submit(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _publish(self, events: list[tuple[str, Event]]) -> None:
        self._call_soon(self._deliver, events)

    def _call_soon(self, callback: Callable[[_T], None], argument: _T) -> None:
        if self._event_loop is None or self._event_loop.is_closed():
            return
        self._event_loop.call_soon_threadsafe(callback, argument)


def _run(call: _Call, loop: DeviceLoop) -> None:
    """Rows wait for it as for any unit. What it raises is its caller's: no step is in flight, and it writes nothing of
    the pool's."""
    started = time.monotonic()
    loop.settle()
    try:
        call.run(loop)
    except Exception as error:  # noqa: BLE001 - whatever the call raises is raised where it is waited for
        call.fail(error)
    loop.add_wait_time(time.monotonic() - started)
