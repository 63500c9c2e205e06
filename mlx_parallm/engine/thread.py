"""ContinuousBatchProcessor: runs the engine on a thread of its own, the device thread, for callers on the event loop.

    event loop                         device thread
    generate(), run() ──▶ inbox ──────▶ Engine.step(), again and again
        ▲                                  │
        └─ one asyncio.Queue per request ◀─┘ call_soon_threadsafe(events of one unit)

A unit is one piece of device work, such as a forward pass. Each base model that is loaded has an `Engine`; they take
turns. Besides requests and events, the threads share only the last snapshot of the statistics. All of these are frozen,
and only the device thread reads arrays.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar, overload

import mlx.core as mx

from mlx_parallm.core import (
    DeviceSchedule,
    EngineStats,
    Event,
    GenerationRequest,
    MachineState,
    PauseMode,
    Relief,
    RequestFailed,
    RequestFinished,
    complete,
    completed,
    then,
)
from mlx_parallm.engine.engine import Engine, EngineParts
from mlx_parallm.engine.stats import StatsOfBases
from mlx_parallm.engine.turns import Turns
from mlx_parallm.errors import EngineDeadError, ModelUnavailableError, RankLostError

T = TypeVar("T")

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_ALIVE_CHECK_S = 1.0
_DRAIN_CHECK_S = 0.05
_SNAPSHOT_S = 0.1
"""While the loop is busy, it takes a new snapshot for `stats` when the last one is older than this, in seconds."""
_DEAD = "the device thread has stopped; restart the server"

_Message = Callable[[], object]
"""A call that the device thread makes between two units."""

Loading = Generator[None, None, EngineParts]
"""Builds the parts of a base model on the device thread, in short parts of work."""


class ContinuousBatchProcessor:
    """Takes requests on the event loop and runs them on the device thread. Implements `core.EngineClient` and
    `core.DeviceThread`.

    Args:
        build: loads the first base model and makes its parts of the engine. Runs on the device thread, because MLX
            arrays belong to the thread that makes them.
        debug: run `Engine.check_integrity` whenever the device is idle. If a check fails, the error is logged and
            the device thread ends.
    """

    def __init__(self, build: Callable[[], EngineParts], debug: bool = False) -> None:
        self._build = build
        self._debug = debug
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()  # None ends the thread
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._pauses = 0  # calls of `pause` and `resume` so far; a later call ends the wait of an earlier one
        self._engines: dict[str, Engine] = {}  # by base model; this and the next five are the device thread's alone
        self._first = ""  # the base model that the process started with
        self._turns = Turns()
        self._bases = StatsOfBases()
        self._schedule = DeviceSchedule()
        self._paused: PauseMode | None = None
        self._relief = Relief.NONE
        self._stats = EngineStats(alive=True, ready=False)
        self._machine = MachineState()
        self._lost_rank = ""  # which rank of a model over several machines is lost, in words
        self._started, self._stopped = threading.Event(), threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)

    # -- any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the device thread and waits until the model is loaded. Raises the exception of `build`, if any."""
        self._thread.start()
        atexit.register(self.stop)  # a process that ends while a thread uses MLX aborts
        self._started.wait()
        if self._start_error is not None:
            self._thread.join()  # it must clear MLX's streams before the process may end
            raise self._start_error

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the device thread after its current unit, or a start that is under way. Running requests fail. Safe to
        call before `start`."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def raise_if_stopped(self) -> None:
        """Is called between the parts of a start that may take minutes on a busy machine, so that `stop` ends it.

        Raises:
            EngineDeadError: `stop` was called.
        """
        if self._stopped.is_set():
            raise EngineDeadError("the engine was stopped while it started")

    def stats(self) -> EngineStats:
        return replace(self._stats, machine=self._machine)

    def heed(self, machine: MachineState) -> None:
        """Does what a new reading of the machine asks for, between two units."""
        if machine.relief is not self._machine.relief:
            self._inbox.put(lambda: self._relieve(machine.relief))
        self._machine = machine

    def forget_speed(self) -> None:
        """Lets the next units say how fast the machine is, because it may have changed."""
        self._inbox.put(lambda: self._each(Engine.forget_speed))

    def lose(self, reason: str) -> None:
        """Fails all requests because another rank is lost, and counts the device thread as stopped, though it may
        hang."""
        self._lost_rank = reason
        self._end()

    def wake(self) -> None:
        """Wakes the loop if it is idle."""
        self._inbox.put(lambda: None)

    # -- the event loop's thread -----------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """See `core.EngineClient.generate`."""
        self._event_loop = asyncio.get_running_loop()
        if not self._stats.alive:
            raise self._dead()
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._queues[request.request_id] = events
        self._inbox.put(lambda: self._submit(request))
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = isinstance(event, RequestFinished | RequestFailed)
                yield event
        finally:
            del self._queues[request.request_id]
            if not ended:
                self._inbox.put(lambda: self._each(lambda engine: engine.abort(request.request_id)))

    async def reschedule(self, schedule: DeviceSchedule) -> None:
        """See `core.EngineClient.reschedule`. Applies to base models that are loaded later, too."""
        await self._change(lambda: self._reschedule_all(schedule))

    async def pause(self, mode: PauseMode) -> None:
        """See `core.EngineClient.pause`."""
        self._pauses += 1
        this_pause, under_way = self._pauses, set(self._queues)
        await self._change(lambda: self._pause_all(mode))
        while mode is PauseMode.WAIT and this_pause == self._pauses and under_way & self._queues.keys():
            await asyncio.sleep(_DRAIN_CHECK_S)

    async def resume(self) -> None:
        """See `core.EngineClient.resume`."""
        self._pauses += 1
        await self._change(self._resume_all)

    async def reset_prefix_cache(self, files: bool = False) -> int:
        """See `core.EngineClient.reset_prefix_cache`."""
        return sum(await self._run_all(lambda engine: engine.reset_prefix_cache(files)))

    async def sleep(self, bank: bool = False) -> None:
        """See `core.EngineClient.sleep`."""
        while self._queues:
            await asyncio.sleep(_DRAIN_CHECK_S)
        if bank:
            await self._run_all(lambda engine: engine.adapters.evict_idle())
        await self.reset_prefix_cache()
        await self._change(lambda: self._each(Engine.give_back_memory))

    @overload
    async def run(self, call: Callable[[], Future[T]]) -> T: ...

    @overload
    async def run(self, call: Callable[[], T]) -> T: ...

    async def run(self, call: Callable[[], Any]) -> Any:
        """See `core.DeviceThread.run`."""
        return await self._run(call)

    async def load(self, building: Loading) -> None:
        """Loads another base model, in turn with the units of those that are loaded.

        Raises:
            Exception: what `building` raises; others are not affected.
            EngineDeadError: the device thread has stopped.
        """

        await self._run(lambda: self._load(building))

    async def unload(self, base: str) -> None:
        """Unloads a base model without requests, and frees its memory."""
        await self._change(lambda: self._unload(base))

    async def _change(self, change: Callable[[], object]) -> None:
        """Applies `change` between two units. When it returns, `stats` shows the change."""

        def change_and_measure() -> None:
            change()
            self._stats = self._read_stats()

        await self._run(change_and_measure)

    async def _run_all(self, function: Callable[[Engine], Future[T]]) -> list[T]:
        """Calls a function for every engine between two units, and waits for what it returns."""
        results: list[T] = await self._run(lambda: _all([function(engine) for engine in self._engines.values()]))
        return results

    async def _run(self, function: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._inbox.put(lambda: self._call(function, done))
        waiting = asyncio.wrap_future(done)
        waiting.add_done_callback(asyncio.Future.exception)  # so that asyncio does not warn if the caller is cancelled
        while not waiting.done():
            if not self._stats.alive:
                raise self._dead()
            await asyncio.wait([waiting], timeout=_ALIVE_CHECK_S)
        return waiting.result()

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        for request_id, event in events:
            if (listener := self._queues.get(request_id)) is not None:
                listener.put_nowait(event)

    def _fail_all(self, error: EngineDeadError) -> None:
        for listener in self._queues.values():
            listener.put_nowait(RequestFailed(error))

    # -- the device thread -----------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._build_and_serve()
        finally:
            mx.clear_streams()  # MLX requires this of each thread that has used it, before the thread ends

    def _build_and_serve(self) -> None:
        try:
            self._add_first(self._build())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that called start(), which raises it
            self._start_error = error
            self._stats = EngineStats(alive=False, ready=False)
            return
        finally:
            self._started.set()
        try:
            self._serve()
        except RankLostError as error:
            _log.exception("the device thread failed")
            self._lost_rank = self._lost_rank or str(error)
        except Exception:  # noqa: BLE001 - the device is lost, or check_integrity failed: log it and end the thread
            _log.exception("the device thread failed")
        finally:
            self._end()
            self._each(Engine.close)

    def _end(self) -> None:
        """Fails all requests, because the device thread has ended or hangs."""
        self._stats = replace(self._stats, alive=False, ready=False)
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._fail_all, self._dead())

    def _dead(self) -> EngineDeadError:
        return RankLostError(self._lost_rank) if self._lost_rank else EngineDeadError(_DEAD)

    def _serve(self) -> None:
        taken_at, busy = 0.0, True
        while self._take_messages(wait_s=0.0 if busy else _IDLE_WAIT_S):
            busy = self._turns.step()
            now = time.monotonic()
            if not busy or now - taken_at > _SNAPSHOT_S:
                self._stats, taken_at = self._refresh(now), now
            if self._debug and not busy:
                self._each(Engine.check_integrity)

    def _take_messages(self, wait_s: float) -> bool:
        """Runs the messages in the inbox, after waiting up to `wait_s` seconds for the first one. Returns False if the
        thread is to end."""
        try:
            message = self._inbox.get(block=wait_s > 0.0, timeout=wait_s or None)
            while message is not None:
                message()
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _submit(self, request: GenerationRequest) -> None:
        base = request.base or self._first
        if base in self._engines:
            self._turns.wake(base)
            self._engines[base].submit(request)
        else:
            error = ModelUnavailableError(f"the base model {base} is not loaded")
            self._publish_events([(request.request_id, RequestFailed(error))])

    def _call(self, function: Callable[[], Any], done: Future[Any]) -> None:
        """Runs `function` and completes `done`. An error concerns the caller only, because no row's arrays are written
        and no forward unit is in flight whose error could show here."""
        self._turns.interrupt()
        started = time.monotonic()
        complete(done, function)
        self._each(lambda engine: engine.after_call(time.monotonic() - started))

    # -- base models -----------------------------------------------------------------------------

    def _add_first(self, parts: EngineParts) -> None:
        self._first, self._schedule = parts.base, parts.scheduler.schedule
        self._add(parts)
        self._stats = self._read_stats()

    def _add(self, parts: EngineParts) -> None:
        parts = replace(parts, scheduler=replace(parts.scheduler, schedule=self._schedule))
        base = parts.base
        engine = Engine(parts, self._publish_events, lambda: self._others_run(base))
        self._engines[base] = engine
        self._turns.add(base, engine.step, engine.rest)
        engine.relieve(self._relief)
        if self._paused is not None:
            engine.pause(self._paused)

    def _others_run(self, base: str) -> bool:
        """Whether another base model than this one has rows."""
        return any(other.has_rows for name, other in self._engines.items() if name != base)

    def _load(self, building: Loading) -> Future[None]:
        """Lets a load take turns with the engines. The future is done when the base model takes requests."""
        key, loaded = object(), Future[None]()

        def step() -> bool:
            started = time.monotonic()
            try:
                next(building)
            except StopIteration as built:
                self._turns.remove(key)
                parts = built.value
                complete(loaded, lambda: self._add(parts))
            except Exception as error:  # noqa: BLE001 - a file or the device: it concerns this load only
                self._turns.remove(key)
                building.close()
                loaded.set_exception(error.with_traceback(None))  # its frames hold arrays
                _free()
            finally:
                self._bases.add_load_time(time.monotonic() - started)
            return True

        self._turns.add(key, step)
        return loaded

    def _unload(self, base: str) -> None:
        engine = self._engines.pop(base)
        self._turns.remove(base)
        engine.rest()
        self._bases.unloaded(base, engine.stats())
        engine.unload()
        del engine
        _free()

    # -- all engines -----------------------------------------------------------------------------

    def _each(self, call: Callable[[Engine], object]) -> None:
        for engine in self._engines.values():
            call(engine)

    def _pause_all(self, mode: PauseMode) -> None:
        self._paused = mode
        self._each(lambda engine: engine.pause(mode))

    def _resume_all(self) -> None:
        self._paused = None
        self._each(lambda engine: engine.scheduler.resume())

    def _reschedule_all(self, schedule: DeviceSchedule) -> None:
        self._schedule = schedule
        self._each(lambda engine: engine.scheduler.reschedule(schedule))

    def _relieve(self, relief: Relief) -> None:
        self._relief = relief
        self._each(lambda engine: engine.relieve(relief))

    # -- statistics ------------------------------------------------------------------------------

    def _refresh(self, now: float) -> EngineStats:
        """Fails requests that have waited too long, and returns the statistics, which survive a fault of the device."""
        for base, engine in self._engines.items():
            with engine.surviving():
                engine.fail_overdue(now)
                self._bases.update(base, engine.stats())
        return self._bases.total(self._paused is not None, self._schedule)

    def _read_stats(self) -> EngineStats:
        """The statistics now."""
        for base, engine in self._engines.items():
            self._bases.update(base, engine.stats())
        return self._bases.total(self._paused is not None, self._schedule)

    # -- events ----------------------------------------------------------------------------------

    def _publish_events(self, events: list[tuple[str, Event]]) -> None:
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._deliver, events)


def _all(futures: list[Future[T]]) -> Future[list[T]]:
    """Is done when all of these are."""
    done: Future[list[T]] = completed([])
    for future in futures:
        done = _appended(done, future)
    return done


def _appended(results: Future[list[T]], last: Future[T]) -> Future[list[T]]:
    return then(results, lambda before: then(last, lambda result: [*before, result]))


def _free() -> None:
    """Frees the arrays of objects that refer to each other, and MLX's freed buffers."""
    gc.collect()
    mx.clear_cache()
