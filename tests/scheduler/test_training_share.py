"""Training micro-steps beside requests: their share of time, and the delays that they may cause."""

from __future__ import annotations

import pytest
from driver import STEP, Driver, new_scheduler

from mlx_parallm.engine.units import ForwardUnit, StagingUnit, TrainingUnit

ENDLESS = 10**9


def learning(micro_step: float, **config: object) -> Driver:
    """A driver whose training always has a micro-step to run."""
    driver = Driver(**config)
    driver.micro_steps, driver.micro_step = ENDLESS, micro_step
    return driver


def run_until(driver: Driver, seconds: float, prompt_tokens: int = 0) -> None:
    """Steps until that time; with `prompt_tokens`, some such prompts always wait."""
    while driver.now < seconds:
        if prompt_tokens and driver.scheduler.waiting < 3:
            driver.add(prompt_tokens, max_tokens=3)
        driver.step()


@pytest.mark.parametrize("prompt_tokens", [0, 40, 900])
@pytest.mark.parametrize(("micro_step", "share"), [(0.1, 0.12), (0.5, 0.12), (1.0, 0.12), (0.5, 0.4)])
def test_beside_rows_training_gets_its_share_of_time(micro_step: float, prompt_tokens: int, share: float) -> None:
    driver = learning(micro_step, training_time_share=share)
    for _ in range(3):
        driver.add(5, max_tokens=ENDLESS)
    run_until(driver, 50 * micro_step / share, prompt_tokens)
    assert driver.training_seconds / driver.now == pytest.approx(share, rel=0.04)


def test_a_share_that_the_gaps_do_not_hold_leaves_no_backlog() -> None:
    """Micro-steps too short for their share while prompts flood in: one a gap, and no more than their share after."""
    driver = learning(0.1, training_time_share=0.4)
    driver.add(5, max_tokens=ENDLESS)
    run_until(driver, 100.0, prompt_tokens=900)
    assert 0.1 < driver.training_seconds / driver.now < 0.3
    while driver.scheduler.waiting or len(driver.scheduler.live) > 1:
        driver.step()
    began, trained = driver.now, driver.training_seconds
    run_until(driver, began + 20.0)
    assert (driver.training_seconds - trained) / (driver.now - began) == pytest.approx(0.4, rel=0.04)


@pytest.mark.parametrize("micro_step", [0.1, 2.0])
def test_a_gap_between_two_steps_holds_one_micro_step_and_no_more_chunks_than_fit_beside_it(micro_step: float) -> None:
    driver = learning(micro_step, max_batched_tokens=10_000)
    driver.add(2, max_tokens=ENDLESS)
    run_until(driver, 1.0)
    gaps, micro_steps, since, trained = [], [], driver.now, driver.training_seconds
    while driver.now < 60 * micro_step:
        if driver.scheduler.waiting < 3:
            driver.add(900, max_tokens=3)
        unit = driver.step()
        if isinstance(unit, ForwardUnit) and unit.decodes:
            gaps.append(driver.now - STEP - since)
            micro_steps.append(round((driver.training_seconds - trained) / micro_step))
            since, trained = driver.now, driver.training_seconds
    assert max(micro_steps) == 1
    longest = max(micro_step, driver.scheduler.gap.chunk_s) + 1e-9
    assert max(gaps) <= longest
    assert driver.scheduler.gap.lengths.largest <= longest + STEP


@pytest.mark.parametrize("micro_step", [0.1, 2.0])
def test_training_slows_prefill_by_little_more_than_its_share(micro_step: float) -> None:
    """A long prompt alone, and one beside rows that decode, where prefill and training both wait for gaps."""
    for rows in (0, 4):
        seconds = []
        for micro_steps in (0, ENDLESS):
            driver = learning(micro_step)
            driver.micro_steps = micro_steps
            for _ in range(rows):
                driver.add(5, max_tokens=ENDLESS)
            driver.step()
            began, long = driver.now, driver.add(5_000, max_tokens=1)
            while long not in driver.finished:
                driver.step()
            seconds.append(driver.now - began)
        assert seconds[1] <= 1.05 * seconds[0] / (1 - 0.12) + 2 * micro_step


def test_staging_goes_before_training_and_both_get_on() -> None:
    driver = learning(0.5)
    driver.add(5, max_tokens=ENDLESS)
    run_until(driver, 10.0)
    driver.staging = 200
    began, trained = driver.now, driver.training_seconds
    while driver.staging:
        driver.step()
    assert driver.now - began < 200 * 1.8 * (STEP + 0.002), "a unit of it between any two steps"
    assert driver.training_seconds > trained
    idle = learning(0.5)
    idle.staging = 3
    assert [type(idle.step()) for _ in range(5)] == [StagingUnit] * 3 + [TrainingUnit] * 2


def test_all_time_that_no_row_uses_goes_to_training() -> None:
    driver = learning(2.0)
    assert all(isinstance(driver.step(), TrainingUnit) for _ in range(50))
    assert driver.training_seconds == driver.now
    trained, row = driver.training_seconds, driver.add(30, max_tokens=8)
    assert [type(driver.step()) for _ in range(2)] == [ForwardUnit] * 2, "a row that comes is served at once"
    while row not in driver.finished:
        driver.step()
    assert driver.training_seconds == trained, "the last micro-step was its share for as long as the row was there"
    assert all(isinstance(driver.step(), TrainingUnit) for _ in range(50))


def test_time_that_training_could_not_use_is_not_saved_up() -> None:
    driver = learning(0.5)
    driver.micro_steps = 0
    driver.add(5, max_tokens=ENDLESS)
    run_until(driver, 1000.0)
    driver.micro_steps = ENDLESS
    run_until(driver, driver.now + 10 * 0.5 / 0.12)
    assert driver.training_seconds == pytest.approx(10 * 0.5, abs=0.5)


def test_a_trainer_that_pauses_between_micro_steps_does_not_get_round_its_share() -> None:
    driver = learning(0.5)
    driver.add(5, max_tokens=ENDLESS)
    while driver.now < 200.0:
        driver.micro_steps = 0
        driver.step()
        driver.micro_steps, trained = 1, driver.training_seconds
        while driver.training_seconds == trained:
            driver.step()
    assert driver.training_seconds / driver.now == pytest.approx(0.12, rel=0.1)


def test_without_rows_training_takes_its_share_only_while_another_base_model_has_some() -> None:
    scheduler = new_scheduler()
    share = scheduler.schedule.training_time_share
    assert isinstance(scheduler.next_unit(10.0, training=True, others_run=True), TrainingUnit)
    scheduler.record_training(1.0, now=11.0)
    assert scheduler.next_unit(12.0, training=True, others_run=True) is None
    assert isinstance(scheduler.next_unit(12.0, training=True), TrainingUnit)
    assert isinstance(scheduler.next_unit(10.1 + 1.0 / share, training=True, others_run=True), TrainingUnit)
