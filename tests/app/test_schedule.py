"""What the configuration leaves to the mode and the device."""

from __future__ import annotations

import pytest

from mlx_parallm.app.device import device_schedule
from mlx_parallm.config import configure
from mlx_parallm.core.requests import WorkClass


@pytest.mark.parametrize(
    ("mode", "given", "share"),
    [
        ("inference_and_training", None, 0.12),
        ("training_priority", None, 0.5),
        ("training_only", None, 0.12),
        ("training_priority", 0.3, 0.3),
        ("inference_and_training", 1.0, 1.0),
    ],
)
def test_the_mode_gives_training_its_share_unless_one_is_given(mode: str, given: float | None, share: float) -> None:
    config = configure(server__mode=mode, rl_training__training_time_share=given)
    assert device_schedule(config, cpu=True).training_time_share == share


@pytest.mark.parametrize(("given", "cpu", "stall"), [(None, True, 0.5), (None, False, 0.1), (250, True, 0.25)])
def test_the_device_says_how_long_rows_may_wait_unless_it_is_given(given: int | None, cpu: bool, stall: float) -> None:
    assert device_schedule(configure(server__max_decode_stall_ms=given), cpu).max_decode_stall_s == stall


def test_priority_ratios_are_the_row_shares() -> None:
    ratios = {"server__priority_ratios__inference": 0.25, "server__priority_ratios__training": 0.75}
    shares = device_schedule(configure(**ratios), cpu=True).row_shares
    assert shares == {WorkClass.INFERENCE: 0.25, WorkClass.TRAINING: 0.75}
