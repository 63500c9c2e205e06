"""Changes of how device time is shared, while the server runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mlx_parallm.core import MODE_SHARES, DeviceSchedule, EngineClient, WorkClass
from mlx_parallm.server.wire.schedule import ScheduleBody


class Rescheduler:
    """One change at a time: each starts from what the one before it left. Event loop only."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()

    async def change(self, body: ScheduleBody) -> None:
        """Puts the fields of `body` in force. Raises EngineDeadError: the device thread is not running."""
        async with self._turn:
            await self._engine.reschedule(changed(self._engine.stats().schedule, body))


def changed(schedule: DeviceSchedule, body: ScheduleBody) -> DeviceSchedule:
    """`schedule` with what `body` gives."""
    if body.mode is not None:
        schedule = replace(schedule, training_time_share=MODE_SHARES[body.mode])
    if body.training_time_share is not None:
        schedule = replace(schedule, training_time_share=body.training_time_share)
    if body.max_decode_stall_ms is not None:
        schedule = replace(schedule, max_decode_stall_s=body.max_decode_stall_ms / 1000)
    if body.priority_ratios is not None:
        ratios = body.priority_ratios
        shares = {WorkClass.INFERENCE: ratios.inference, WorkClass.TRAINING: ratios.training}
        schedule = replace(schedule, row_shares=shares)
    return schedule
