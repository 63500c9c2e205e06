"""Forward units in flight: the next one is chosen before the last one is read, and a fault takes them back."""

from __future__ import annotations

import pytest
from driver import Driver, new_scheduler, new_sequence

from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.scheduler import RLAwareScheduler
from mlx_parallm.engine.sequence import PromptGroup, Sequence, SequenceStatus
from mlx_parallm.engine.units import ForwardUnit


def launched(scheduler: RLAwareScheduler, now: float = 0.0) -> ForwardUnit:
    """Launches the next unit; it is not done yet."""
    scheduler.admit()
    unit = scheduler.next_unit(now)
    assert isinstance(unit, ForwardUnit)
    scheduler.record_launch(unit, now)
    return unit


def added(scheduler: RLAwareScheduler, tokens: int, group: PromptGroup | None = None) -> Sequence:
    sequence = new_sequence([0] * tokens, 100, group=group)
    scheduler.add(sequence)
    return sequence


def counts(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.computed, sequence.sampled, sequence.pending


def test_prompts_that_come_are_computed_beside_rows_whose_tokens_are_not_read() -> None:
    scheduler = new_scheduler(CostModel(0.01, 1e-4, 0.0))
    row = added(scheduler, 10)
    first = launched(scheduler)
    assert (first.decodes, first.sampling, counts(row)) == (0, (row,), (10, 1, 1))
    prompt = added(scheduler, 30)
    second = launched(scheduler)
    assert [span.row for span in second.rows] == [row]
    assert [(span.row, span.start, span.tokens) for span in second.chunks] == [(prompt, 0, 30)]
    assert second.sampling == (row, prompt)
    third = launched(scheduler)
    assert [(span.row, span.start, span.tokens) for span in third.spans] == [(row, 11, 1), (prompt, 30, 1)]
    assert (row.unread, prompt.unread) == (3, 2)
    for now, unit in enumerate((first, second, third), 1):
        scheduler.record_done(unit, 0.1, float(now))
    scheduler.check_integrity()


def test_a_fault_takes_back_what_was_launched() -> None:
    driver = Driver(max_batched_tokens=16)
    row = driver.add(10, max_tokens=6)
    while len(row.tokens) < 12:
        driver.step()
    prompt = driver.add(40, max_tokens=6)
    driver.step()
    launched(driver.scheduler, driver.now)
    driver.unread = ()
    assert (row.unread, prompt.computed) == (2, 32)
    for sequence in driver.scheduler.live:
        driver.scheduler.preempt(sequence)
    for sequence in driver.scheduler.sequences():
        sequence.forget_unread()
    assert (counts(row), counts(prompt)) == ((0, 3, 13), (0, 0, 40))
    driver.scheduler.check_integrity()
    driver.run()
    assert set(driver.finished) == {row, prompt}
    assert (len(row.tokens), len(prompt.tokens)) == (16, 46)


def test_a_group_opens_when_its_prompt_is_launched_and_shares_it() -> None:
    """Its members compute what the first one's row does not give them, here the last block of the prompt."""
    driver = Driver(cost=CostModel(0.01, 1e-4, 0.0))
    cached = driver.memory.cached
    driver.memory.cached = lambda sequence: cached(sequence) // 64 * 64
    group = PromptGroup()
    members = [driver.add(150, group=group) for _ in range(4)]
    first, second = driver.step(), driver.step()
    assert isinstance(first, ForwardUnit)
    assert isinstance(second, ForwardUnit)
    assert [(span.row, span.tokens) for span in first.spans] == [(members[0], 150)]
    assert [(span.start, span.tokens) for span in second.spans] == [(150, 1), *[(128, 22)] * 3]
    assert second.sampling == tuple(members)


def test_the_rest_of_a_group_passes_long_prompts_that_wait() -> None:
    """What is left of their prompt is short, so it needs no place among the long prompts in prefill."""
    driver = Driver(cost=CostModel(0.01, 1e-3, 0.0))
    group = PromptGroup()
    members = [driver.add(100, group=group) for _ in range(3)]
    for _ in range(20):
        driver.add(2000)
    while members[0].status is not SequenceStatus.RUNNING:
        driver.step()
    driver.step()
    assert all(member.sampled for member in members)


def test_gaps_are_measured_between_the_ends_of_steps() -> None:
    scheduler = new_scheduler()
    added(scheduler, 2)
    for now in (1.0, 2.0, 3.5, 3.6):
        scheduler.record_done(launched(scheduler, now - 0.5), 0.5, now)
    lengths = scheduler.gap.lengths
    assert (sum(lengths.counts), lengths.largest) == (2, 1.5), "the first unit has no decode rows"


def test_prompts_get_their_predicted_part_of_a_unit_with_rows() -> None:
    scheduler = new_scheduler(CostModel(fixed=1.0, per_token=0.5, per_pair=0.0))
    row = added(scheduler, 10)
    prefill = launched(scheduler)
    decode = launched(scheduler)
    added(scheduler, 4)
    mixed = launched(scheduler)
    assert [unit.decodes for unit in (prefill, decode, mixed)] == [0, 1, 1]
    took = ((prefill, 6.0), (decode, 1.5), (mixed, 3.5))  # as predicted
    parts = [scheduler.record_done(unit, seconds, now) for now, (unit, seconds) in enumerate(took)]
    assert parts == [6.0, 0.0, pytest.approx(2.0)], "4 tokens of 0.5 s"
    assert row.status is SequenceStatus.RUNNING
