"""Rollouts beside live requests: their share of rows, and how they give way."""

from __future__ import annotations

from collections import Counter

import pytest
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.sequence import SequenceStatus
from mlx_parallm.engine.units import ForwardUnit

LIVE, ROLLOUT = WorkClass.INFERENCE, WorkClass.TRAINING
ENDLESS = 10**9


def classes(unit: ForwardUnit) -> Counter[WorkClass]:
    return Counter(span.row.work_class for span in unit.rows)


def decoding(driver: Driver) -> ForwardUnit:
    """The next unit of decode rows alone; nothing is left to prefill."""
    while True:
        unit = driver.step()
        if isinstance(unit, ForwardUnit) and not unit.chunks:
            assert all(s.status is SequenceStatus.RUNNING for s in driver.scheduler.live)
            return unit


@pytest.mark.parametrize(("live", "drawing"), [(1, 1), (2, 1), (5, 2), (7, 3), (10, 4)])
def test_beside_live_requests_rollouts_draw_by_their_share(live: int, drawing: int) -> None:
    driver = Driver()
    for _ in range(8):
        driver.add(5, max_tokens=ENDLESS, work_class=ROLLOUT)
    assert classes(decoding(driver)) == {ROLLOUT: 8}, "idle rows are all theirs"
    for _ in range(live):
        driver.add(5, max_tokens=ENDLESS)
    assert classes(decoding(driver)) == {LIVE: live, ROLLOUT: drawing}


def test_beside_live_requests_rollouts_have_one_row_while_training_waits() -> None:
    driver = Driver()
    for work_class in (ROLLOUT, LIVE):
        for _ in range(8):
            driver.add(5, max_tokens=ENDLESS, work_class=work_class)
    assert classes(decoding(driver)) == {LIVE: 8, ROLLOUT: 3}
    driver.micro_steps = 1000
    assert classes(decoding(driver)) == {LIVE: 8, ROLLOUT: 1}
    driver.micro_steps = 0
    assert classes(decoding(driver)) == {LIVE: 8, ROLLOUT: 3}


def test_a_share_of_one_leaves_rollouts_one_row() -> None:
    driver = Driver(row_shares={LIVE: 1.0, ROLLOUT: 0.0})
    for _ in range(3):
        driver.add(5, max_tokens=ENDLESS)
        driver.add(5, max_tokens=ENDLESS, work_class=ROLLOUT)
    assert classes(decoding(driver)) == {LIVE: 3, ROLLOUT: 1}


def test_prompts_of_live_requests_are_computed_first() -> None:
    driver = Driver(max_batched_tokens=64)
    rollout = driver.add(30, work_class=ROLLOUT)
    live = driver.add(60)
    unit = driver.step()
    assert isinstance(unit, ForwardUnit)
    assert [span.row for span in unit.spans] == [live]
    driver.run()
    assert set(driver.finished) == {rollout, live}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([LIVE, ROLLOUT]), st.integers(1, 200), st.integers(1, 12)), max_size=12),
    st.integers(220, 600),
)
def test_whatever_comes_everything_ends(work: list[tuple[WorkClass, int, int]], budget: int) -> None:
    driver = Driver(budget=budget, max_rows=6)
    for work_class, tokens, most in work:
        driver.add(tokens, max_tokens=most, work_class=work_class)
        driver.step()
    driver.run()
    assert len(driver.finished) == len(work)
    assert driver.memory.held == {}


# ---- the schedule at run time, and its meters ----------------------------------------------------


def beside_rows(share: float, micro_step: float = 0.4) -> Driver:
    driver = Driver(training_time_share=share)
    driver.micro_steps, driver.micro_step = ENDLESS, micro_step
    driver.add(5, max_tokens=ENDLESS)
    return driver


def run_for(driver: Driver, seconds: float) -> float:
    """Training's share of that time."""
    began, trained = driver.now, driver.training_seconds
    while driver.now < began + seconds:
        driver.step()
    return (driver.training_seconds - trained) / (driver.now - began)


def test_a_new_schedule_takes_effect_at_once() -> None:
    driver = beside_rows(0.12)
    assert run_for(driver, 100) == pytest.approx(0.12, rel=0.05)
    driver.scheduler.reschedule(DeviceSchedule(training_time_share=0.5))
    assert run_for(driver, 40) == pytest.approx(0.5, rel=0.05)
    driver.scheduler.reschedule(DeviceSchedule(training_time_share=0.05))
    assert run_for(driver, 200) == pytest.approx(0.05, rel=0.1)
