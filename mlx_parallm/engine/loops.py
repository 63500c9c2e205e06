"""DeviceLoops: the base models that are loaded take turns on the device thread, one unit of work at a time.

Each base model has a `DeviceLoop` of its own. The next unit is of the one that has had the least device time among
those with work. Loading a base model is cut into parts, which take turns with the units of the others.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_parallm.core import (
    DeviceSchedule,
    DeviceSeconds,
    EngineStats,
    GenerationRequest,
    PauseMode,
    Relief,
    RequestFailed,
    complete,
    completed,
    then,
)
from mlx_parallm.engine.loop import DeviceLoop
from mlx_parallm.engine.parts import EngineParts
from mlx_parallm.engine.requests import PublishEvents
from mlx_parallm.engine.stats import counters_of, total
from mlx_parallm.errors import ModelUnavailableError

_ASK_AGAIN_S = 0.05
"""While others have work, one without is asked again for work after so many seconds."""

Loading = Generator[None, None, EngineParts]
"""Builds the parts of a base model on the device thread, in short parts of work."""


@dataclass(eq=False, slots=True)
class _Turns:
    """What takes turns with others: the loop of a base model, or a load.

    Attributes:
        step: runs one unit. False if there is none.
        rest: called before somebody else's unit runs.
        seconds: device time so far. What was idle for a while counts as having had as much as the others.
        ask_at: when it is asked for work again, if it had none.
    """

    step: Callable[[], bool]
    rest: Callable[[], None]
    seconds: float = 0.0
    busy: bool = True
    ask_at: float = 0.0


class DeviceLoops:
    """Owns the loops of all base models that are loaded. Every method runs on the device thread.

    Args:
        first: the parts of the base model that the process starts with.
    """

    def __init__(self, first: EngineParts, publish: PublishEvents) -> None:
        self._publish = publish
        self._loops: dict[str, DeviceLoop] = {}
        self._turns: dict[object, _Turns] = {}
        self._current: _Turns | None = None
        self._pause: PauseMode | None = None
        self._relief = Relief.NONE
        self._schedule = first.scheduler.schedule
        self._first = first.base
        self._stats: dict[str, EngineStats] = {}  # as they were last read
        self._loading_s = 0.0  # spent on loads
        self._gone: dict[str, EngineStats] = {}  # what each base model had counted before it was unloaded
        self._add(first)

    # -- base models -----------------------------------------------------------------------------

    def load(self, building: Loading, done: Future[None]) -> None:
        """Runs a load, in turn with the units of the others. `done` is completed when the base model takes requests, or
        with the error of the load."""
        key = object()

        def step() -> bool:
            started = time.monotonic()
            try:
                next(building)
            except StopIteration as built:
                del self._turns[key]
                parts = built.value
                complete(done, lambda: self._add(parts))
            except Exception as error:  # noqa: BLE001 - a file or the device: it concerns this load only
                del self._turns[key]
                building.close()
                done.set_exception(error.with_traceback(None))  # its frames hold arrays
                _free()
            finally:
                self._loading_s += time.monotonic() - started
            return True

        self._turns[key] = _Turns(step, lambda: None, self._least_seconds())

    def _add(self, parts: EngineParts) -> None:
        parts = replace(parts, scheduler=replace(parts.scheduler, schedule=self._schedule))
        loop = self._loops[parts.base] = DeviceLoop(parts, self._publish)
        self._turns[parts.base] = _Turns(loop.step, loop.rest, self._least_seconds())
        loop.relieve(self._relief)
        if self._pause is not None:
            loop.pause(self._pause)

    def unload(self, base: str) -> None:
        """Unloads a base model that has no requests, and frees its memory."""
        loop = self._loops.pop(base)
        turns = self._turns.pop(base)
        if self._current is turns:
            self._current = None
        loop.rest()
        self._gone[base] = self._since_start(base, counters_of(loop.stats()))
        self._stats.pop(base, None)
        loop.unload()
        del loop, turns
        _free()

    def _least_seconds(self) -> float:
        return min((turns.seconds for turns in self._turns.values() if turns.busy), default=0.0)

    # -- requests --------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """See `DeviceLoop.submit`."""
        base = request.base or self._first
        if base not in self._loops:
            error = ModelUnavailableError(f"the base model {base} is not loaded")
            self._publish([(request.request_id, RequestFailed(error))])
            return
        self._wake(self._turns[base])
        self._loops[base].submit(request)

    def abort(self, request_id: str) -> None:
        """See `DeviceLoop.abort`."""
        for loop in self._loops.values():
            loop.abort(request_id)

    def call(self, function: Callable[[DeviceLoops], Any], done: Future[Any]) -> None:
        """Runs `function` and completes `done`. An error concerns the caller only, because no row's arrays are written
        and no forward unit is in flight whose error could show here."""
        if self._current is not None:
            self._current.rest()
        started = time.monotonic()
        complete(done, lambda: function(self))
        for loop in self._loops.values():
            loop.after_call(time.monotonic() - started)
        for turns in self._turns.values():
            turns.ask_at = 0.0

    def pause(self, mode: PauseMode) -> None:
        """See `DeviceLoop.pause`."""
        self._pause = mode
        for loop in self._loops.values():
            loop.pause(mode)

    def resume(self) -> None:
        """Ends a pause."""
        self._pause = None
        for loop in self._loops.values():
            loop.scheduler.resume()

    def reschedule(self, schedule: DeviceSchedule) -> None:
        """Applies a new schedule from the next unit on, also to base models that are loaded later."""
        self._schedule = schedule
        for loop in self._loops.values():
            loop.scheduler.reschedule(schedule)

    def relieve(self, relief: Relief) -> None:
        """See `DeviceLoop.relieve`. Applies to base models that are loaded later too."""
        self._relief = relief
        for loop in self._loops.values():
            loop.relieve(relief)

    def forget_speed(self) -> None:
        """See `DeviceLoop.forget_speed`."""
        for loop in self._loops.values():
            loop.forget_speed()

    def reset_prefix_cache(self, files: bool = False) -> Future[int]:
        """See `DeviceLoop.reset_prefix_cache`."""
        tokens = completed(0)
        for loop in self._loops.values():
            tokens = _sum(tokens, loop.reset_prefix_cache(files))
        return tokens

    def evict_idle_adapters(self) -> Future[None]:
        """See `AdapterStore.evict_idle`."""
        done = completed(None)
        for evicted in [loop.adapters.evict_idle() for loop in self._loops.values()]:
            done = then(done, lambda _, evicted=evicted: evicted)  # type: ignore[misc]
        return done

    def give_back_memory(self) -> None:
        """See `DeviceLoop.give_back_memory`."""
        for loop in self._loops.values():
            loop.give_back_memory()

    # -- turns -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs the next unit of device work. False if there is none."""
        now, turns = time.monotonic(), sorted(self._turns.values(), key=lambda each: each.seconds)
        due = [each for each in turns if each.busy or each.ask_at <= now]
        return any(map(self._run, due)) or any(self._run(each) for each in turns if each not in due)

    def _run(self, turns: _Turns) -> bool:
        if self._current is not None and self._current is not turns:
            self._current.rest()
        self._current, started = turns, time.monotonic()
        for loop in self._loops.values():
            loop.others_run = any(other.has_rows for other in self._loops.values() if other is not loop)
        worked = turns.step()
        now = time.monotonic()
        if worked:
            self._wake(turns)
        turns.busy, turns.ask_at = worked, now + _ASK_AGAIN_S
        turns.seconds += now - started
        return worked

    def _wake(self, turns: _Turns) -> None:
        """Notes that there is work again."""
        if not turns.busy:
            turns.busy, turns.seconds = True, max(turns.seconds, self._least_seconds())

    # -- state -----------------------------------------------------------------------------------

    def refresh(self, now: float) -> EngineStats:
        """Fails requests that have waited too long, and returns the statistics, which survive a fault of the device."""
        for base, loop in self._loops.items():
            with loop.surviving():
                loop.fail_overdue(now)
                self._stats[base] = loop.stats()
        return self._total()

    def stats(self) -> EngineStats:
        """Counters and gauges of all base models now."""
        self._stats = {base: loop.stats() for base, loop in self._loops.items()}
        return self._total()

    def _total(self) -> EngineStats:
        bases = {base: self._since_start(base, stats) for base, stats in self._stats.items()}
        gone = {base: counted for base, counted in self._gone.items() if base not in bases}
        stats = total([*bases.values(), *gone.values()])
        seconds = stats.device_seconds.plus(DeviceSeconds(other=self._loading_s))
        stats = replace(stats, device_seconds=seconds)
        if len(bases) == 1 and not gone:
            return stats
        details = {base: dict(one.detail) for base, one in self._stats.items()}
        stats = replace(stats, paused=self._pause is not None, schedule=self._schedule)
        return replace(stats, detail={**stats.detail, "base_models": details}, bases=bases | gone)

    def _since_start(self, base: str, stats: EngineStats) -> EngineStats:
        """The statistics of a loaded base model, with what it had counted before it was last unloaded."""
        return total([stats, self._gone[base]]) if base in self._gone else stats

    def check_integrity(self) -> None:
        """See `DeviceLoop.check_integrity`."""
        for loop in self._loops.values():
            loop.check_integrity()

    def close(self) -> None:
        """See `DeviceLoop.close`."""
        for loop in self._loops.values():
            loop.close()


def _sum(first: Future[int], second: Future[int]) -> Future[int]:
    return then(first, lambda tokens: then(second, lambda more: tokens + more))


def _free() -> None:
    """Frees the arrays of objects that refer to each other, and MLX's freed buffers."""
    gc.collect()
    mx.clear_cache()
