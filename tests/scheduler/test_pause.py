"""A pause: new sequences wait, and running ones continue or stand still."""

from driver import Driver

from mlx_parallm.engine.sequence import SequenceStatus
from mlx_parallm.engine.units import ForwardUnit, StagingUnit, TrainingUnit


def test_a_prompt_half_way_stands_still_too() -> None:
    driver = Driver(max_batched_tokens=16)
    prompt = driver.add(100)
    driver.step()
    computed = prompt.computed
    driver.scheduler.pause(freeze=True)
    assert driver.run() == []
    driver.scheduler.resume()
    units = driver.run()
    chunks = [span for unit in units if isinstance(unit, ForwardUnit) for span in unit.chunks]
    assert sum(span.tokens for span in chunks) == 100 - computed


def test_frozen_staging_and_training_get_all_the_time() -> None:
    driver = Driver()
    driver.add(20, max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.scheduler.pause(freeze=True)
    driver.staging, driver.micro_steps = 3, 2
    units = driver.run()
    assert [type(unit) for unit in units] == [StagingUnit] * 3 + [TrainingUnit] * 2


def test_a_second_pause_keeps_what_the_first_one_holds() -> None:
    driver = Driver()
    driver.scheduler.pause(freeze=True)
    held = driver.add(20)
    driver.scheduler.pause(freeze=False)
    driver.run()
    assert held.status is SequenceStatus.WAITING
    driver.scheduler.resume()
    driver.scheduler.resume()
    driver.run()
    assert held.status is SequenceStatus.FINISHED
