"""The cost model's scale follows the machine, by prefill units and by decode steps."""

from __future__ import annotations

import pytest

from mlx_parallm.scheduler.prefill import CostModel
from mlx_parallm.scheduler.units import Chunk

PROMPT, ROWS = [Chunk(100, 0)], [Chunk(1, 50)] * 4
STEP_RATIO = 1.4


class Machine:
    """Runs units so many times slower than calibrated, each as soon as the last one has ended."""

    def __init__(self) -> None:
        self.cost = CostModel(0.01, 0.001, 1e-6)
        self.calibrated = CostModel(0.01, 0.001, 1e-6)
        self.now = 0.0

    def prefill(self, slower: float, times: int = 1) -> None:
        for _ in range(times):
            seconds = slower * self.calibrated.seconds(PROMPT)
            self.now += seconds
            self.cost.observe_prefill(PROMPT, seconds, self.now)

    def decode(self, slower: float, times: int = 1) -> None:
        for _ in range(times):
            seconds = slower * STEP_RATIO * self.calibrated.seconds(ROWS)
            self.now += seconds
            self.cost.observe_step(ROWS, seconds, self.now)


def test_the_scale_follows_prefill_units() -> None:
    machine = Machine()
    machine.prefill(3.0, times=40)
    assert machine.cost.seconds([Chunk(50, 0)]) == pytest.approx(3 * machine.calibrated.seconds([Chunk(50, 0)]), 0.01)


@pytest.mark.parametrize(("before", "after"), [(1.0, 6.0), (6.0, 1.0)])
def test_decode_steps_alone_correct_the_scale(before: float, after: float) -> None:
    """Other processes take the cores, or leave them, while no prompt comes."""
    machine = Machine()
    for _ in range(40):
        machine.decode(before)
        machine.prefill(before)
    machine.decode(after, times=30)
    assert machine.cost.scale == pytest.approx(after, rel=0.05)


def test_steps_that_cost_more_than_predicted_are_no_sign_of_a_slow_machine() -> None:
    machine = Machine()
    machine.decode(1.0, times=50)
    for _ in range(20):
        machine.prefill(1.0)
        machine.decode(1.0, times=5)
    assert machine.cost.scale == pytest.approx(1.0)


def test_after_idle_minutes_the_newest_observation_counts_most() -> None:
    machine = Machine()
    machine.prefill(10.0, times=40)
    machine.now += 120.0
    machine.prefill(1.0)
    assert machine.cost.scale == pytest.approx(1.0, abs=0.2)


def test_one_outlier_does_not_spoil_the_scale() -> None:
    machine = Machine()
    machine.prefill(1.0, times=5)
    machine.prefill(1000.0)
    assert machine.cost.scale < 3.0
