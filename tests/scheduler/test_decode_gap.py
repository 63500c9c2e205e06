"""What may delay a decode step, and how long the time between two of them was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlx_parallm.engine.budget import DecodeGap


@pytest.mark.parametrize("ends", [DecodeGap.close, DecodeGap.idle])
def test_what_delays_a_step_counts_until_the_step_or_until_nothing_waits(ends: Callable[[DecodeGap], None]) -> None:
    gap = DecodeGap(0.2)
    for _ in range(2):
        assert gap.is_fresh
        assert not gap.interrupted
        assert gap.remaining_s == gap.chunk_s == 0.2
        gap.add_wait_time(0.05)
        assert gap.is_fresh
        assert not gap.interrupted
        gap.add_staging(0.03)
        assert gap.interrupted
        assert gap.may_stage(urgent=True, rows_wait=True)
        gap.add_training(0.06)
        assert gap.remaining_s == pytest.approx(0.06)
        assert not gap.is_fresh
        assert not gap.may_stage(urgent=True, rows_wait=True), "training took the time for it"
        assert gap.may_stage(urgent=True, rows_wait=False)
        gap.add_wait_time(1.0)
        assert gap.remaining_s == 0.0
        ends(gap)


def test_only_times_in_which_a_row_waited_are_recorded() -> None:
    gap = DecodeGap(0.2)
    for now in (10.0, 10.25):
        gap.add_step(0.1, now, 0.0)
    assert (sum(gap.lengths.counts), gap.lengths.total) == (1, 0.25)
    gap.idle()
    gap.add_step(0.1, 90.0, 0.0)
    assert (sum(gap.lengths.counts), gap.lengths.total) == (1, 0.25)
