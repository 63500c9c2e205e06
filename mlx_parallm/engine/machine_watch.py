"""MachineWatch reads the machine's memory, power, clocks and cores each second, and has what runs here act on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from mlx_parallm.config import Config
from mlx_parallm.core.machine import UNKNOWN_MACHINE, MachineState, Relief, seconds_with_sleep
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.kv.device_memory import MemoryAccount
from mlx_parallm.machine.guard import MemoryGuard
from mlx_parallm.machine.memory import MemoryReading, read_memory
from mlx_parallm.machine.power import PowerReading, read_power
from mlx_parallm.machine.processors import BlasThreads
from mlx_parallm.model.device import machine_memory

T = TypeVar("T")

_INTERVAL_S = 1.0
_POWER_CALM_S = 15.0
"""Power must have been no reason to wait for so long before training resumes, so that a hot machine cools down."""
_SLEPT_S = 2.0
"""The machine has slept if the clock that counts sleep advanced at least this much more than the other."""
_RAM_SHARE = 0.9
"""The automatic limit of this process' memory, as a share of RAM."""

_log = logging.getLogger(__name__)


def footprint_limit(configured: int | None, ram: int) -> int:
    """Bytes that this process may take; 0 if it is not watched. `configured`: `server.memory_guard`."""
    return int(_RAM_SHARE * ram) if configured is None else configured


@dataclass(frozen=True, slots=True)
class Readers:
    """Where readings come from. `clocks`: `time.monotonic`, which stops while the machine sleeps, and one that does
    not."""

    memory: Callable[[], MemoryReading] = read_memory
    power: Callable[[], PowerReading] = read_power
    clocks: Callable[[], tuple[float, float]] = lambda: (time.monotonic(), seconds_with_sleep())


class MachineWatch:
    """Event loop's thread only; the readings themselves are taken on a thread of their own. What cannot be read is
    logged once, and then taken as if nothing was in the way.

    Args:
        processor: does what the readings ask for.
        threads: follow the cores that other programs leave; None: their number stays.
    """

    def __init__(
        self,
        config: Config,
        processor: ContinuousBatchProcessor,
        threads: BlasThreads | None = None,
        readers: Readers | None = None,
    ) -> None:
        self._processor = processor
        self._threads = threads
        self._readers = readers or Readers()
        self._trains_on_battery = config.rl_training.train_on_battery
        limit = footprint_limit(config.server.memory_guard, machine_memory().ram)
        self._guard = MemoryGuard(limit) if limit else None
        self._state = MachineState(footprint_limit=limit)
        self._hold_training: Callable[[str], None] = lambda reason: None
        self._power_reason, self._power_reason_at = "", 0.0
        self._clocks = self._readers.clocks()
        self._unreadable: set[str] = set()

    def attach(self, hold_training: Callable[[str], None]) -> None:
        """Has `hold_training` called whenever the reason for which training should wait changes; with "" when there is
        none any more."""
        self._hold_training = hold_training
        hold_training(self._state.training_waits_for)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watches until the block ends. The first reading is taken before it begins."""
        with ThreadPoolExecutor(1, thread_name_prefix="machine") as reader:
            await self._look(reader)
            task = asyncio.create_task(self._run(reader))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self, reader: ThreadPoolExecutor) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self._look(reader)

    async def _look(self, reader: ThreadPoolExecutor) -> None:
        memory, power = await asyncio.get_running_loop().run_in_executor(reader, self._read)
        try:
            self.look(memory, power)
        except Exception as error:  # noqa: BLE001 - whatever fails, nothing may stay held back by a watch that has ended
            self._processor.heed(UNKNOWN_MACHINE)
            self._warn_once("state", error)

    def _read(self) -> tuple[MemoryReading | None, PowerReading | None]:
        memory = self._reading("memory", self._readers.memory) if self._guard is not None else None
        if self._threads is not None:
            self._reading("cores", self._threads.adapt)
        return memory, self._reading("power supply", self._readers.power)

    def _reading(self, what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - a system may say anything; without a reading, the server just serves
            self._warn_once(what, error)
            return None

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._unreadable:
            _log.warning("the %s of this machine is not watched: %r", what, error)
        self._unreadable.add(what)

    # -- what a reading means --------------------------------------------------------------------

    def look(self, memory: MemoryReading | None, power: PowerReading | None) -> None:
        """Takes in one reading; None: it could not be taken."""
        self._note_sleep()
        now = self._clocks[0]
        relief, shortage = Relief.NONE, ""
        if self._guard is not None:
            stats = self._processor.stats()
            self._guard.update(memory, stats.running == 0, now, _gives_back(stats))
            relief, shortage = self._guard.relief, self._guard.shortage
        waits_for = self._waits_for_power(power, now)
        if relief >= Relief.ROLLOUTS:
            waits_for = "memory is short"  # without `shortage`, which may change each second
        state = MachineState(
            memory.footprint if memory else 0, self._state.footprint_limit, relief, shortage, waits_for
        )
        before, self._state = self._state, state
        self._processor.heed(state)
        if before.training_waits_for != waits_for:
            self._hold_training(waits_for)
        _log_changes(before, state)

    def _note_sleep(self) -> None:
        before, self._clocks = self._clocks, self._readers.clocks()
        slept = (self._clocks[1] - before[1]) - (self._clocks[0] - before[0])
        if slept >= _SLEPT_S:
            _log.info("the machine has slept for %.0f s; the speed of its device is measured again", slept)
            self._processor.forget_speed()

    def _waits_for_power(self, power: PowerReading | None, now: float) -> str:
        if power is None:
            return ""
        if reason := power.reason_to_wait(self._trains_on_battery):
            self._power_reason, self._power_reason_at = reason, now
        elif now - self._power_reason_at >= _POWER_CALM_S:
            self._power_reason = ""
        return self._power_reason


def _gives_back(stats: EngineStats) -> bool:
    """Whether the engine holds memory that it gives back when no cached prefixes are kept."""
    held = {account: stats.memory_bytes.get(account, 0) for account in MemoryAccount}
    return held[MemoryAccount.PREFIXES] + held[MemoryAccount.FREE_BLOCKS] > held[MemoryAccount.ROWS] / 4


def _log_changes(before: MachineState, state: MachineState) -> None:
    if state.relief != before.relief:
        level = logging.WARNING if state.relief > before.relief else logging.INFO
        text = state.relief_text or "There is enough memory again: nothing is held back for it."
        takes, most = state.footprint / 2**30, state.footprint_limit / 2**30
        _log.log(level, "%s This process takes %.1f GiB of at most %.1f GiB.", text, takes, most)
    if (waits := state.training_waits_for) != before.training_waits_for:
        _log.info("%s", f"training waits: {waits}" if waits else "training resumes")
