"""Configuration → how the device is shared; what is left to the mode and the device is resolved here."""

from __future__ import annotations

from mlx_parallm.config import Config
from mlx_parallm.core import MODE_SHARES, DeviceSchedule, WorkClass

_STALL_S, _CPU_STALL_S = 0.1, 0.5


def device_schedule(config: Config, cpu: bool) -> DeviceSchedule:
    """`cpu`: whether MLX computes on one, where a decode step alone takes most of the other devices' limit."""
    server, usual = config.server, DeviceSchedule()
    share = MODE_SHARES.get(server.mode.value, usual.training_time_share)
    stall = server.max_decode_stall_ms
    return DeviceSchedule(
        training_time_share=config.rl_training.training_time_share or share,
        max_decode_stall_s=stall / 1000 if stall else _CPU_STALL_S if cpu else _STALL_S,
        row_shares={
            WorkClass.INFERENCE: server.priority_ratios.inference,
            WorkClass.TRAINING: server.priority_ratios.training,
        },
    )
