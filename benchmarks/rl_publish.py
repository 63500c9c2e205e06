"""From the end of an optimizer step until a request has the version that it made, while 8 rows decode.

    micro-step │ optimizer step │ staging, flip │ a request arrives │ … │ its row pins the version
                                └───────────── update to live ──────────┘

A request is sent whenever the name has been flipped: it is the one that waits at the door. A unit of device work cannot
be cut, so the longest one in between is taken off.
"""

import asyncio
import time
from dataclasses import dataclass, field

from rl_batch import trajectories
from rl_rig import answer, clients, config, lean_rig
from training_rig import Rig

from mlx_parallm.adapters.books import AdapterBooks
from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.core import AdapterRef
from mlx_parallm.engine.loop import DeviceLoop
from mlx_parallm.rl.update import Update

ROWS, GROUPS = 8, 1
SHARE = 0.5
"""Of the device, for training, and one group only: what comes after the optimizer's step is the same."""
TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class Live:
    """Seconds from the end of the optimizer step until the first pin. `unit_s`: the longest unit of device work in
    between, or what lies in between of it; `units`: how many.
    """

    seconds: float
    unit_s: float
    units: int

    @property
    def beyond_s(self) -> float:
        """Without the unit in progress."""
        return self.seconds - self.unit_s


@dataclass(slots=True)
class _Watch:
    """Written on the device thread, by `time.perf_counter`. `units`: of device work, from when to when."""

    ended: float = 0.0
    pinned: dict[AdapterRef, float] = field(default_factory=dict)
    units: list[tuple[float, float]] = field(default_factory=list)

    def live(self, ref: AdapterRef) -> Live:
        begin, end = self.ended, self.pinned[ref]
        between = [min(end, stop) - max(begin, start) for start, stop in self.units if stop > begin and start < end]
        return Live(end - begin, max(between, default=0.0), len(between))


def measure(updates: int) -> list[Live]:
    """In this process, which is to be one of its own: it changes classes of the engine."""
    return asyncio.run(_measure(updates))


async def _measure(updates: int) -> list[Live]:
    watch = _Watch()
    _watch_units(watch)
    async with lean_rig(config(None, SHARE)) as made:
        store = made.served.adapters._store
        _watch_updates(watch)
        _watch_pins(store, watch)
        await made.training.start()
        async with clients(made, [None] * ROWS), asyncio.TaskGroup() as requests:
            _knock(made, store.books, requests)
            await _update(made, watch, 0)  # the first one makes the bank
            return [await _update(made, watch, number) for number in range(1, updates + 1)]


async def _update(made: Rig, watch: _Watch, number: int) -> Live:
    report = await made.training.service.update(None, trajectories(number, GROUPS))
    ref = report.adapter
    if report.status != "published" or ref is None:
        raise RuntimeError(f"an update was {report.status}: {report.reason}")
    while ref not in watch.pinned or watch.units[-1][1] < watch.pinned[ref]:
        await asyncio.sleep(TICK_S)
    live = watch.live(ref)
    print(f"  {ref}  live after {1e3 * live.seconds:.0f} ms, the longest unit {1e3 * live.unit_s:.0f} ms", flush=True)
    return live


# ---- what is watched -----------------------------------------------------------------------------


def _watch_units(watch: _Watch) -> None:
    step = DeviceLoop.step

    def timed(self: DeviceLoop) -> bool:
        began = time.perf_counter()
        busy = step(self)
        if busy:
            watch.units.append((began, time.perf_counter()))
        return busy

    DeviceLoop.step = timed  # type: ignore[method-assign]


def _watch_updates(watch: _Watch) -> None:
    step = Update.step

    def watched(self: Update, max_grad_norm: float) -> None:
        step(self, max_grad_norm)
        watch.ended = time.perf_counter()

    Update.step = watched  # type: ignore[method-assign]


def _watch_pins(store: AdapterStore, watch: _Watch) -> None:
    pin = store.pin

    def watched(ref: AdapterRef) -> int:
        watch.pinned.setdefault(ref, time.perf_counter())
        return pin(ref)

    store.pin = watched  # type: ignore[method-assign]


def _knock(made: Rig, books: AdapterBooks, requests: asyncio.TaskGroup) -> None:
    """Sends a request as soon as a name means another version. Names are flipped on the device thread."""
    loop, flip = asyncio.get_running_loop(), books.flip

    def flipped(ref: AdapterRef) -> None:
        flip(ref)
        loop.call_soon_threadsafe(lambda: requests.create_task(answer(made)))

    books.flip = flipped  # type: ignore[method-assign]
