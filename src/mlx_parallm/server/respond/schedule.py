"""The schedule and what came of it, worded for the wire: milliseconds there, seconds here."""

from __future__ import annotations

from typing import cast

from mlx_parallm.core import MODE_SHARES, DeviceSchedule, EngineStats, WorkClass
from mlx_parallm.server.wire.schedule import Measured, ModeName, PriorityRatios, Schedule


def schedule_object(stats: EngineStats) -> Schedule:
    schedule = stats.schedule
    return Schedule(
        mode=mode_of(schedule),
        training_time_share=schedule.training_time_share,
        max_decode_stall_ms=_milliseconds(schedule.max_decode_stall_s),
        priority_ratios=PriorityRatios(
            inference=schedule.row_shares[WorkClass.INFERENCE], training=schedule.row_shares[WorkClass.TRAINING]
        ),
        measured=Measured(
            training_share=stats.training_share, largest_decode_gap_ms=_milliseconds(stats.decode_gaps.largest)
        ),
    )


def mode_of(schedule: DeviceSchedule) -> ModeName:
    """The mode that shares time like this; `custom` where none does."""
    modes = (mode for mode, share in MODE_SHARES.items() if share == schedule.training_time_share)
    return cast(ModeName, next(modes, "custom"))


def _milliseconds(seconds: float) -> float:
    """To the nanosecond, so that 1001 ms come back as 1001."""
    return round(seconds * 1000, 6)
