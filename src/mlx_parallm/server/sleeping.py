"""Asleep and awake: asleep, requests are kept away, and what only sampling holds is given back."""

from __future__ import annotations

import asyncio

from mlx_parallm.core import EngineClient
from mlx_parallm.server.limits import SequenceGate

CHECK_S = 0.05


class SleepSwitch:
    """Whether the server is asleep: from the moment that requests are refused. Event loop only."""

    def __init__(self, engine: EngineClient, gate: SequenceGate) -> None:
        self.asleep = False
        self._engine = engine
        self._gate = gate
        self._falling: set[asyncio.Task[None]] = set()

    async def fall_asleep(self, bank: bool = False) -> None:
        """Returns when the requests under way have ended and the memory is given back, or when it was woken first.
        `bank`: the adapters' slots are given back too.

        Raises:
            EngineDeadError: the device thread is not running.
        """
        self.asleep = True
        falling = asyncio.create_task(self._give_back(bank))
        self._falling.add(falling)
        falling.add_done_callback(self._falling.discard)
        await asyncio.wait([falling])
        if not falling.cancelled():
            falling.result()

    def wake(self) -> None:
        """Requests are taken again; the first of them takes the memory again."""
        self.asleep = False
        for falling in self._falling:
            falling.cancel()

    async def _give_back(self, bank: bool) -> None:
        while self._gate.held:  # a request may be inside that the engine has not seen yet
            await asyncio.sleep(CHECK_S)
        await self._engine.sleep(bank)
