"""A pause: new sequences wait, and running ones continue or stand still."""

from driver import Driver

from mlx_parallm.engine.sequence import SequenceStatus
from mlx_parallm.engine.units import ForwardUnit, StagingUnit, TrainingUnit


def test_what_comes_while_paused_waits_and_what_was_there_ends() -> None:
    driver = Driver()
    first = driver.add(20)
    driver.step()
    queued = driver.add(20)
    driver.scheduler.pause(freeze=False)
    later = driver.add(20)
    driver.run()
    assert [first.status, queued.status] == [SequenceStatus.FINISHED] * 2
    assert later.status is SequenceStatus.WAITING
    assert driver.scheduler.waiting == 1
    driver.scheduler.resume()
    driver.run()
    assert later.status is SequenceStatus.FINISHED


def test_frozen_rows_keep_their_places_and_go_on() -> None:
    driver = Driver()
    running, queued = driver.add(20, max_tokens=30), None
    while running.sampled < 5:
        driver.step()
    driver.scheduler.pause(freeze=True)
    queued = driver.add(20)
    sampled, held = running.sampled, dict(driver.memory.held)
    assert driver.run() == []
    assert (running.status, running.sampled, driver.memory.held) == (SequenceStatus.RUNNING, sampled, held)
    driver.scheduler.resume()
    units = driver.run()
    assert sum(isinstance(unit, ForwardUnit) and running in unit.sampling for unit in units) == 30 - sampled
    assert queued.status is SequenceStatus.FINISHED
    assert driver.scheduler.preemptions == 0


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


def test_a_pause_is_no_gap_between_two_steps() -> None:
    driver = Driver()
    driver.add(20, max_tokens=30)
    for _ in range(6):
        driver.step()
    driver.scheduler.pause(freeze=True)
    driver.run()
    driver.now += 1000
    driver.scheduler.resume()
    driver.run()
    assert driver.scheduler.gap.lengths.largest < 1


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


def test_what_is_held_can_be_given_up() -> None:
    driver = Driver()
    driver.scheduler.pause(freeze=False)
    held = driver.add(20)
    driver.scheduler.finish(held)
    driver.scheduler.resume()
    assert driver.run() == []
    assert driver.scheduler.waiting == 0
