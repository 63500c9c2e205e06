"""ContinuousBatchProcessor: runs the engine on a thread of its own, the device thread, for callers on the event loop.

    event loop                         device thread
    generate(), run() ──▶ inbox ──────▶ Engine.step(), again and again
        ▲                                  │
        └─ one asyncio.Queue per request ◀─┘ call_soon_threadsafe(events of one unit)

A unit is one piece of device work, such as a forward pass. Each base model that is loaded has an `Engine`; they share
the device's time. Besides requests and events, the threads share only the last snapshot of the statistics. All of these
are frozen, and only the device thread reads arrays.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

import mlx.core as mx

from mlx_parallm.core.device import DeviceSchedule, PauseMode, complete
from mlx_parallm.core.machine import MachineState, Relief
from mlx_parallm.core.requests import Event, GenerationRequest, RequestFailed, RequestFinished
from mlx_parallm.engine.engine import Engine, EngineParts
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.engine.stats import StatsOfBases
from mlx_parallm.engine.watchdog import LOADING_S, DeviceWatchdog
from mlx_parallm.errors import DeviceHungError, EngineDeadError, ModelUnavailableError, RankLostError

T = TypeVar("T")

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_ALIVE_CHECK_S = 1.0
_DRAIN_CHECK_S = 0.05
_SNAPSHOT_S = 0.1
"""While the loop is busy, it takes a new snapshot for `stats` when the last one is older than this, in seconds."""
_ASK_AGAIN_S = 0.05
"""While others have work, a base model without any is asked again for work after so many seconds."""
_DEAD = "the device thread has stopped; restart the server"

_Message = Callable[[], object]
"""A call that the device thread makes between two units."""

Loading = Generator[None, None, EngineParts]
"""Builds the parts of a base model on the device thread, in short parts of work."""


@dataclass(eq=False, slots=True)
class _Member:
    """An engine, or a load.

    Attributes:
        step: runs one unit. False if there is none.
        rest: called before somebody else's unit runs.
        seconds: device time so far. What was idle for a while counts as having had as much as the others.
        ask_at: when it is asked for work again, if it had none.
    """

    step: Callable[[], bool]
    rest: Callable[[], None]
    seconds: float
    busy: bool = True
    ask_at: float = 0.0


class FairShare:
    """Divides the device between base models: the next unit is of the one that has had the least device time among
    those with work. A base model that is being loaded is a member, too. Device thread only."""

    def __init__(self) -> None:
        self._members: dict[Hashable, _Member] = {}
        self._current: _Member | None = None

    def add(self, key: Hashable, step: Callable[[], bool], rest: Callable[[], None] = lambda: None) -> None:
        """Adds a member. `step` runs one unit, or returns False if there is none; `rest` is called before a unit of
        another one."""
        self._members[key] = _Member(step, rest, self._least_seconds())

    def remove(self, key: Hashable) -> None:
        """Removes a member, which may be the one that runs now."""
        if self._members.pop(key) is self._current:
            self._current = None

    def wake(self, key: Hashable) -> None:
        """Notes that a member has work again."""
        self._wake(self._members[key])

    def step(self) -> bool:
        """Runs the next unit of device work. False if there is none."""
        now, members = time.monotonic(), sorted(self._members.values(), key=lambda member: member.seconds)
        due = [member for member in members if member.busy or member.ask_at <= now]
        return any(map(self._run, due)) or any(self._run(member) for member in members if member not in due)

    def interrupt(self) -> None:
        """Lets the member that ran last rest, because something else runs now, which may make work for any of them."""
        if self._current is not None:
            self._current.rest()
        for member in self._members.values():
            member.ask_at = 0.0

    def _run(self, member: _Member) -> bool:
        if self._current is not None and self._current is not member:
            self._current.rest()
        self._current, started = member, time.monotonic()
        worked = member.step()
        now = time.monotonic()
        if worked:
            self._wake(member)
        member.busy, member.ask_at = worked, now + _ASK_AGAIN_S
        member.seconds += now - started
        return worked

    def _wake(self, member: _Member) -> None:
        if not member.busy:
            member.busy, member.seconds = True, max(member.seconds, self._least_seconds())

    def _least_seconds(self) -> float:
        return min((member.seconds for member in self._members.values() if member.busy), default=0.0)


@dataclass(frozen=True, slots=True)
class _Controls:
    """What was asked of all engines. It is asked of base models that are loaded later, too."""

    schedule: DeviceSchedule
    paused: PauseMode | None = None
    relief: Relief = Relief.NONE


class ContinuousBatchProcessor:
    """Takes requests on the event loop and runs them on the device thread. Implements `core.EngineClient` and
    `core.DeviceThread`.

    Args:
        build: loads the first base model and makes its parts of the engine. Runs on the device thread, because MLX
            arrays belong to the thread that makes them.
        debug: run `Engine.check_integrity` whenever the device is idle. If a check fails, the error is logged and
            the device thread ends.
        timeout_s: see `config.ServerConfig.device_timeout`.
    """

    def __init__(self, build: Callable[[], EngineParts], debug: bool = False, timeout_s: float | None = None) -> None:
        self._build = build
        self._debug = debug
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()  # None ends the thread
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._pauses = 0  # calls of `pause` and `resume` so far; a later call ends the wait of an earlier one
        self._engines: dict[str, Engine] = {}  # by base model; this and the next four are the device thread's alone
        self._first = ""  # the base model that the process started with
        self._fair_share = FairShare()
        self._bases = StatsOfBases()
        self._controls = _Controls(DeviceSchedule())
        self._stats = EngineStats(alive=True, ready=False)
        self._machine = MachineState()
        self._dead: Callable[[], EngineDeadError] = partial(EngineDeadError, _DEAD)
        self._started, self._stopped = Future[None](), threading.Event()
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)
        self._watchdog = DeviceWatchdog(timeout_s, self._hang)
        self._hangs = False

    # -- any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the device thread and waits until the model is loaded. Raises the exception of `build`, if any."""
        self._thread.start()
        self._watchdog.watch(self._thread)
        atexit.register(self.stop)  # a process that ends while a thread uses MLX aborts
        if self._started.exception() is not None and not self._hangs:
            self._thread.join()  # it must clear MLX's streams before the process may end
        self._started.result()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the device thread after its current unit, or a start that is under way. Running requests fail. Safe to
        call before `start`."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._inbox.put(None)
        if self._thread.ident is not None and not self._hangs:
            self._thread.join(timeout_s)

    def raise_if_stopped(self) -> None:
        """Is called between the parts of a start that may take minutes on a busy machine, so that `stop` ends it.

        Raises:
            EngineDeadError: `stop` was called.
        """
        if self._stopped.is_set():
            raise EngineDeadError("the engine was stopped while it started")

    def stats(self) -> EngineStats:
        return replace(self._stats, machine=self._machine, stuck=self._watchdog.notice)

    def heed(self, machine: MachineState) -> None:
        """Does what a new reading of the machine asks for, between two units."""
        if machine.relief is not self._machine.relief:
            relief = machine.relief
            self._inbox.put(lambda: self._control(lambda engine: engine.relieve(relief), relief=relief))
        self._machine = machine

    def forget_speed(self) -> None:
        """Lets the next units say how fast the machine is, because it may have changed."""
        self._inbox.put(lambda: self._each(Engine.forget_speed))

    def lose(self, reason: str, error: type[EngineDeadError] = RankLostError) -> None:
        """Fails all requests because another rank is lost, or with another error, and counts the device thread as
        stopped, though it may hang."""
        self._dead = partial(error, reason)
        self._end()

    def _hang(self, reason: str, at: TracebackType | None) -> None:
        """The same because the device thread hangs."""
        self._hangs = True
        error = DeviceHungError(f"{reason} The server ends.")
        _log.critical("%s", error, exc_info=(DeviceHungError, error, at))
        atexit.register(self._watchdog.leave)  # comes before the exit handlers of MLX, which would wait for the thread
        self.lose(str(error), DeviceHungError)
        if not self._started.done():
            self._started.set_exception(self._dead())

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
        await self._change(lambda engine: engine.scheduler.reschedule(schedule), schedule=schedule)

    async def pause(self, mode: PauseMode) -> None:
        """See `core.EngineClient.pause`."""
        self._pauses += 1
        this_pause, under_way = self._pauses, set(self._queues)
        await self._change(lambda engine: engine.pause(mode), paused=mode)
        while mode is PauseMode.WAIT and this_pause == self._pauses and under_way & self._queues.keys():
            await asyncio.sleep(_DRAIN_CHECK_S)

    async def resume(self) -> None:
        """See `core.EngineClient.resume`."""
        self._pauses += 1
        await self._change(lambda engine: engine.scheduler.resume(), paused=None)

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
        await self._change(lambda engine: engine.memory.give_back())

    @overload
    async def run(self, call: Callable[[], Future[T]]) -> T: ...

    @overload
    async def run(self, call: Callable[[], T]) -> T: ...

    async def run(self, call: Callable[[], Any]) -> Any:
        """See `core.DeviceThread.run`."""
        return await self._run(call)

    async def load(self, building: Loading) -> None:
        """Loads another base model, between the units of those that are loaded.

        Raises:
            Exception: what `building` raises; others are not affected.
            EngineDeadError: the device thread has stopped.
        """
        await self._run(lambda: self._load(building))

    async def unload(self, base: str) -> None:
        """Unloads a base model without requests, and frees its memory."""
        await self._run(lambda: self._unload(base))

    async def _change(self, change: Callable[[Engine], object], **controls: Any) -> None:
        """Changes every engine between two units. When it returns, `stats` shows the change. `controls`: the fields of
        `_Controls` that base models which are loaded later need for it."""

        def change_and_measure() -> None:
            self._control(change, **controls)
            self._refresh()

        await self._run(change_and_measure)

    async def _run_all(self, function: Callable[[Engine], Future[T]]) -> list[T]:
        """Calls a function for every engine between two units, and waits for what it returns."""
        futures: list[Future[T]] = await self._run(lambda: [function(engine) for engine in self._engines.values()])
        return [await self._wait(future) for future in futures]

    async def _run(self, function: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._inbox.put(lambda: self._call(function, done))
        return await self._wait(done)

    async def _wait(self, future: Future[T]) -> T:
        """The result of what the device thread does. Raises EngineDeadError if it stops before that."""
        waiting = asyncio.wrap_future(future)
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
            self._watchdog.stop()
            mx.clear_streams()  # MLX requires this of each thread that has used it, before the thread ends

    def _build_and_serve(self) -> None:
        try:
            self._watchdog.begin("loading the base model", LOADING_S)
            self._add_first(self._build())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that called start(), which raises it
            self._stats = EngineStats(alive=False, ready=False)
            if not self._started.done():
                self._started.set_exception(error)
            return
        if self._started.done():  # it hung, and came back too late
            return
        self._started.set_result(None)
        try:
            self._serve()
        except RankLostError as error:
            _log.exception("the device thread failed")
            self._dead = partial(RankLostError, str(error))
        except Exception:  # noqa: BLE001 - the device is lost, or check_integrity failed: log it and end the thread
            _log.exception("the device thread failed")
        finally:
            self._end()
            self._each(Engine.close)

    def _end(self) -> None:
        """Fails all requests, because the device thread has ended or hangs."""
        self._stats = replace(self._stats, alive=False, ready=False)
        self._call_on_event_loop(lambda: self._fail_all(self._dead()))

    def _serve(self) -> None:
        taken_at, busy = 0.0, True
        while self._take_messages(wait_s=0.0 if busy else _IDLE_WAIT_S):
            self._watchdog.begin("scheduling")
            busy = self._fair_share.step()
            now = time.monotonic()
            if not busy or now - taken_at > _SNAPSHOT_S:
                taken_at = now
                self._each(partial(Engine.fail_overdue, now=now))  # no local variable may keep an engine in memory
                self._refresh()
            if self._debug and not busy:
                self._each(Engine.check_integrity)

    def _take_messages(self, wait_s: float) -> bool:
        """Runs the messages in the inbox, after waiting up to `wait_s` seconds for the first one. Returns False if the
        thread is to end."""
        try:
            self._watchdog.rest()
            message = self._inbox.get(block=wait_s > 0.0, timeout=wait_s or None)
            self._watchdog.begin("a call between steps")
            while message is not None:
                message()
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _submit(self, request: GenerationRequest) -> None:
        base = request.base or self._first
        if base in self._engines:
            self._fair_share.wake(base)
            self._engines[base].submit(request)
        else:
            error = ModelUnavailableError(f"the base model {base} is not loaded")
            self._publish_events([(request.request_id, RequestFailed(error))])

    def _call(self, function: Callable[[], Any], done: Future[Any]) -> None:
        """Runs `function` and completes `done`. An error concerns the caller only, because no row's arrays are written
        and no forward unit is in flight whose error could show here."""
        self._fair_share.interrupt()
        started = time.monotonic()
        complete(done, function)
        self._each(lambda engine: engine.after_call(time.monotonic() - started))

    # -- base models -----------------------------------------------------------------------------

    def _add_first(self, parts: EngineParts) -> None:
        self._first, self._controls = parts.base, _Controls(parts.scheduler.schedule)
        self._add(parts)
        self._refresh()

    def _add(self, parts: EngineParts) -> None:
        base, controls = parts.base, self._controls
        parts = replace(parts, scheduler=replace(parts.scheduler, schedule=controls.schedule))
        engine = self._engines[base] = Engine(
            parts, self._publish_events, lambda: self._others_run(base), self._watchdog.begin
        )
        self._fair_share.add(base, engine.step, engine.rest)
        engine.relieve(controls.relief)
        if controls.paused is not None:
            engine.pause(controls.paused)

    def _others_run(self, base: str) -> bool:
        """Whether another base model than this one has rows."""
        return any(other.scheduler.live for name, other in self._engines.items() if name != base)

    def _load(self, building: Loading) -> Future[None]:
        """Lets a load share the device with the engines. The future is done when the base model takes requests."""
        key, loaded = object(), Future[None]()

        def step() -> bool:
            started = time.monotonic()
            self._watchdog.begin("loading a base model", LOADING_S)
            try:
                next(building)
            except StopIteration as built:
                self._fair_share.remove(key)
                parts = built.value
                complete(loaded, lambda: self._add(parts))
            except Exception as error:  # noqa: BLE001 - a file or the device: it concerns this load only
                self._fair_share.remove(key)
                building.close()
                loaded.set_exception(error.with_traceback(None))  # its frames hold arrays
                _free()
            finally:
                self._bases.add_load_time(time.monotonic() - started)
            return True

        self._fair_share.add(key, step)
        return loaded

    def _unload(self, base: str) -> None:
        engine = self._engines.pop(base)
        self._fair_share.remove(base)
        try:
            engine.rest()
            self._bases.unloaded(base, engine.stats())
            engine.unload()
        finally:
            del engine
            _free()
            self._refresh()

    # -- all engines -----------------------------------------------------------------------------

    def _each(self, call: Callable[[Engine], object]) -> None:
        for engine in self._engines.values():
            call(engine)

    def _control(self, ask: Callable[[Engine], object], **controls: Any) -> None:
        """Asks something of every engine, and remembers it as these fields of `_Controls` for those that come later."""
        self._controls = replace(self._controls, **controls)
        self._each(ask)

    def _refresh(self) -> EngineStats:
        """Takes a new snapshot of the statistics, and survives a fault of the device."""
        for base, engine in self._engines.items():
            with engine.surviving():
                self._bases.update(base, engine.stats())
        if not self._hangs:  # else it came back too late
            self._stats = self._bases.total(self._controls.paused is not None, self._controls.schedule)
        return self._stats

    # -- events ----------------------------------------------------------------------------------

    def _publish_events(self, events: list[tuple[str, Event]]) -> None:
        self._call_on_event_loop(lambda: self._deliver(events))

    def _call_on_event_loop(self, call: Callable[[], object]) -> None:
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(call)


def _free() -> None:
    """Frees the arrays of objects that refer to each other, and MLX's freed buffers."""
    gc.unfreeze()  # a base model with which the process has begun may be among them
    gc.collect()
    gc.freeze()
    mx.clear_cache()
