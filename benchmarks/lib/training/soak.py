"""Serves and trains for half an hour, and measures memory after each sixth of that time.

8 clients use the adapter that is trained, and all their answers are trained on. Memory is measured while no request and
no update runs.
"""

import asyncio
import os
import time
from dataclasses import dataclass

from benchmarks.lib.machine import resident_bytes
from benchmarks.lib.training.lean_rig import config, lean_rig
from benchmarks.lib.training.rig import Rig

CLIENTS, GROUP, TOKENS, BATCH = 8, 4, 24, 16
PARTS = 6
"""Number of measurements. Every slot of the bank has been used before the first one."""
TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. `active`: MLX's bytes without the KV pool. `arrays`: number of arrays that Python's garbage
    collector knows. `resident`: bytes of the process."""

    minutes: float
    updates: int
    active: int
    arrays: int
    resident: int


@dataclass(frozen=True, slots=True)
class Soak:
    requests: int
    failed: list[str]
    skips: dict[str, int]
    points: list[Point]


def measure(minutes: float) -> Soak:
    """Runs the benchmark in this process."""
    return asyncio.run(_measure(minutes))


async def _measure(minutes: float) -> Soak:
    async with lean_rig(config(None, batch_size=BATCH), GROUP, TOKENS) as made:
        await made.training.start_adapter("default")
        began = time.monotonic()
        points = []
        for part in range(1, PARTS + 1):
            until = part * minutes / PARTS
            await made.load(CLIENTS, lambda until=until: time.monotonic() - began > 60 * until)  # type: ignore[misc]
            points.append(await _quiet(made, began))
        status = made.status()
        return Soak(next(made.requests), made.failed, dict(status.skips), points)


async def _quiet(made: Rig, began: float) -> Point:
    while made.status().state == "updating":
        await asyncio.sleep(TICK_S)
    active, arrays = await made.on_device(made.footprint)
    updates, minutes = made.status().updates_total, (time.monotonic() - began) / 60
    point = Point(minutes, updates, active, arrays, resident_bytes(os.getpid()))
    print(
        f"  {minutes:4.1f} minutes, {updates} updates, {active / 1e6:.1f} MB in {arrays} arrays, "
        f"the process {point.resident / 1e6:.0f} MB",
        flush=True,
    )
    return point
