"""Measures the time from the end of an optimizer step until a request uses the new version, while 8 rows decode.

    micro-step │ optimizer step │ staging, live │ a request arrives │ … │ its row pins the version
                                └───────────── update to live ──────────┘

A request is sent as soon as the version is live. A unit of device work cannot be interrupted, so the longest unit
within that time is subtracted.
"""

import asyncio
import time
from dataclasses import dataclass, field

from benchmarks.lib.training.batch import trajectories
from benchmarks.lib.training.lean_rig import answer, clients, config, lean_rig
from benchmarks.lib.training.rig import Rig
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.engine.engine import Engine
from mlx_parallm.train.policy import Policy, PolicySnapshot, PolicyState

ROWS, GROUPS = 8, 1
SHARE = 0.5
"""Training time share. It and the small batch do not change what follows the optimizer step."""
TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class Live:
    """Seconds from the end of the optimizer step until the first pin. `unit_s`: the longest unit of device work within
    that time, counting only its part within it; `units`: the number of units.
    """

    seconds: float
    unit_s: float
    units: int

    @property
    def beyond_s(self) -> float:
        """Seconds without the longest unit."""
        return self.seconds - self.unit_s


@dataclass(slots=True)
class _Watch:
    """`time.perf_counter` times, written on the device thread. `units`: begin and end of each unit of device work."""

    ended: float = 0.0
    pinned: dict[AdapterRef, float] = field(default_factory=dict)
    units: list[tuple[float, float]] = field(default_factory=list)

    def live(self, ref: AdapterRef) -> Live:
        begin, end = self.ended, self.pinned[ref]
        between = [min(end, stop) - max(begin, start) for start, stop in self.units if stop > begin and start < end]
        return Live(end - begin, max(between, default=0.0), len(between))


def measure(updates: int) -> list[Live]:
    """Runs the benchmark in this process, which must be its own, because the engine's classes are patched."""
    return asyncio.run(_measure(updates))


async def _measure(updates: int) -> list[Live]:
    watch = _Watch()
    _watch_units(watch)
    async with lean_rig(config(None, SHARE)) as made:
        store = made.served.adapters._store
        _watch_updates(watch)
        _watch_pins(store, watch)
        await made.training.start_adapter("default")
        async with clients(made, [None] * ROWS), asyncio.TaskGroup() as requests:
            _knock(made, store.registry, requests)
            await _update(made, watch, 0)  # the first update makes the bank
            return [await _update(made, watch, number) for number in range(1, updates + 1)]


async def _update(made: Rig, watch: _Watch, number: int) -> Live:
    report = await made.training.update(None, trajectories(number, GROUPS))
    ref = report.adapter
    if report.status != "published" or ref is None:
        raise RuntimeError(f"an update was {report.status}: {report.reason}")
    while ref not in watch.pinned or watch.units[-1][1] < watch.pinned[ref]:
        await asyncio.sleep(TICK_S)
    live = watch.live(ref)
    print(f"  {ref}  live after {1e3 * live.seconds:.0f} ms, the longest unit {1e3 * live.unit_s:.0f} ms", flush=True)
    return live


# ---- patches of the engine -----------------------------------------------------------------------


def _watch_units(watch: _Watch) -> None:
    step = Engine.step

    def timed(self: Engine) -> bool:
        began = time.perf_counter()
        busy = step(self)
        if busy:
            watch.units.append((began, time.perf_counter()))
        return busy

    Engine.step = timed  # type: ignore[method-assign]


def _watch_updates(watch: _Watch) -> None:
    restore = Policy.restore

    def watched(self: Policy, goal: PolicyState | PolicySnapshot | None) -> None:
        restore(self, goal)  # the last thing that a step does
        watch.ended = time.perf_counter()

    Policy.restore = watched  # type: ignore[method-assign]


def _watch_pins(store: AdapterStore, watch: _Watch) -> None:
    pin = store.pin

    def watched(ref: AdapterRef) -> int:
        watch.pinned.setdefault(ref, time.perf_counter())
        return pin(ref)

    store.pin = watched  # type: ignore[method-assign]


def _knock(made: Rig, registry: AdapterRegistry, requests: asyncio.TaskGroup) -> None:
    """Sends a request as soon as another version is live, which happens on the device thread."""
    loop, flip = asyncio.get_running_loop(), registry.flip

    def flipped(ref: AdapterRef) -> None:
        flip(ref)
        loop.call_soon_threadsafe(lambda: requests.create_task(answer(made)))

    registry.flip = flipped  # type: ignore[method-assign]
