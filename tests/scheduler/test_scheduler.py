"""The scheduler alone: a pure-Python memory, a clock that the test holds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from driver import STEP, Driver, new_scheduler, new_sequence
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.sequence import PromptGroup, Sequence, SequenceStatus
from mlx_parallm.engine.units import ForwardUnit, StagingUnit, Unit

ABSENT = AdapterRef("absent", 1)


def forwards(units: Iterable[Unit]) -> list[ForwardUnit]:
    return [unit for unit in units if isinstance(unit, ForwardUnit)]


def chunks(units: Iterable[Unit]) -> list[int]:
    """The lengths of all chunks of prompts, in order."""
    return [span.tokens for unit in forwards(units) for span in unit.chunks]


def test_a_sequence_waits_for_its_adapter_and_holds_up_nobody() -> None:
    driver = Driver(max_rows=2)
    first, second = driver.add(10, adapter=ABSENT), driver.add(10)
    driver.memory.not_ready.add(ABSENT)
    driver.run()
    assert driver.finished == [second]
    assert first.status is SequenceStatus.WAITING
    driver.memory.not_ready.clear()
    driver.run()
    assert driver.finished == [second, first]


def test_staging_gets_a_share_between_two_steps_and_all_that_is_idle() -> None:
    driver = Driver()
    driver.add(2, max_tokens=40)
    for _ in range(20):
        driver.step()
    driver.staging = 10**6
    gaps, since = [], driver.now
    while driver.scheduler.live:
        if isinstance(driver.step(), ForwardUnit):
            gaps.append(driver.now - since)
            since = driver.now
    assert max(gaps) <= 1.6 * STEP
    assert min(gaps[1:]) > STEP, "some is staged between any two steps"
    assert all(isinstance(driver.step(), StagingUnit) for _ in range(5))


def test_staging_without_end_keeps_no_prompt_from_being_computed() -> None:
    """Versions that wait for each other's slots are staged in turns until a row ends; so rows have to get on."""
    driver = Driver()
    driver.staging = 10**6
    prompt = driver.add(3000, max_tokens=1)
    for _ in range(1000):
        driver.step()
    assert prompt in driver.finished


def test_a_scored_prompt_that_draws_nothing_leaves_its_last_token() -> None:
    driver = Driver()
    sequence = driver.add(100, max_tokens=0, scored=True)
    units = forwards(driver.run())
    assert (chunks(units), [unit.sampling for unit in units]) == ([99], [()])
    assert driver.finished == [sequence]


def test_decode_waits_no_longer_than_the_stall_allowance() -> None:
    """Chunks make a step longer by `max_decode_stall_s` at most, whatever is waiting."""
    driver = Driver(max_decode_stall_s=0.2, max_batched_tokens=10_000)
    driver.add(2, max_tokens=50)
    driver.step()
    driver.step()
    for _ in range(3):
        driver.add(3000)
    stalls, since = [], driver.now
    while driver.scheduler.live:
        unit = driver.step()
        if isinstance(unit, ForwardUnit) and len(driver.finished) == 0:
            stalls.append(driver.now - since - 0.05)
            since = driver.now
    assert max(stalls) <= 0.2 + 1e-9
    assert max(stalls) > 0.1, "and prefill does get its share"


def test_attention_makes_late_chunks_shorter() -> None:
    driver = Driver(cost=CostModel(0.01, 1e-4, 1e-6), max_decode_stall_s=0.1, max_batched_tokens=10_000)
    driver.add(4000, max_tokens=1)
    lengths = chunks(driver.run())
    assert lengths[0] > 4 * lengths[-2]
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)


def test_a_short_prompt_overtakes_a_long_one_that_is_under_way() -> None:
    driver = Driver(max_batched_tokens=64)
    long = driver.add(5000)
    driver.step()
    driver.step()
    short = driver.add(30)
    while short not in driver.finished:
        driver.step()
    assert long.status is SequenceStatus.PREFILLING


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    driver = Driver(max_batched_tokens=64, max_rows=4)
    long = driver.add(2000, max_tokens=1)
    for _ in range(2000):
        if long in driver.finished:
            return
        if driver.scheduler.waiting < 3:
            driver.add(50, max_tokens=1)
        driver.step()
    raise AssertionError(f"{long.computed} of 2000 tokens after {driver.now:.0f} s")


def test_priority_comes_before_length() -> None:
    driver = Driver(max_rows=1)
    driver.add(500, priority=0)
    urgent = driver.add(1000, priority=-1)
    first = driver.step()
    assert isinstance(first, ForwardUnit)
    assert [span.row for span in first.spans] == [urgent]


@pytest.mark.parametrize(("live", "expected"), [("both", {7, 3}), ("training", {10}), ("inference", {10})])
def test_shares_are_of_rows_and_work_conserving(live: str, expected: set[int]) -> None:
    driver = Driver(max_rows=10)
    for work_class in WorkClass:
        if live in ("both", work_class.value):
            for _ in range(20):
                driver.add(1, max_tokens=100, work_class=work_class)
    driver.step()
    rows = [sum(s.work_class is work_class for s in driver.scheduler.live) for work_class in WorkClass]
    assert {count for count in rows if count} == expected


@pytest.mark.parametrize("rows", [0, 3])
def test_a_unit_holds_any_number_of_short_prompts_and_two_long_ones(rows: int) -> None:
    driver = Driver(cost=CostModel(0.01, 1e-5, 0.0))
    for _ in range(rows):
        driver.add(2, max_tokens=100)
    driver.step()
    for length in (100, 64, 90, 80, *[30] * 20):
        driver.add(length)
    unit = driver.step()
    assert len(unit.rows) == rows
    assert sorted(chunks([unit])) == [*[30] * 20, 64, 80, 90]


def test_prompts_are_ranked_by_what_is_left_to_compute() -> None:
    driver = Driver(max_rows=1)
    driver.memory.cached = lambda sequence: 900 if sequence.prompt_length == 950 else 0
    driver.add(100)
    known = driver.add(950)
    driver.step()
    assert driver.scheduler.live == (known,)


def test_preempted_rows_are_recomputed_and_the_oldest_is_kept() -> None:
    driver = Driver(budget=120)
    rows = [driver.add(30, max_tokens=40) for _ in range(3)]
    driver.run()
    assert driver.scheduler.preemptions > 0
    assert driver.finished[0] is rows[0]
    assert set(driver.finished) == set(rows)


def test_chunks_of_prompts_take_no_more_than_the_unit_that_has_them() -> None:
    driver = Driver()
    driver.add(2, max_tokens=100)
    driver.step()
    driver.add(20)
    unit = driver.step()
    assert isinstance(unit, ForwardUnit)
    assert unit.decodes
    assert unit.chunks
    driver.scheduler.cost = CostModel(0.001, 0.001, 0.0, steps=((1, 0.001), (32, 0.002)))
    assert driver.scheduler.record_done(unit, 0.002, driver.now) == pytest.approx(0.002)


def test_a_scheduler_with_its_defaults_runs_without_an_engine() -> None:
    scheduler = new_scheduler()
    group = PromptGroup()
    rows = [new_sequence([1, 2, 3], 2, group=group) for _ in range(2)]
    for row in rows:
        scheduler.add(row)
    units: list[ForwardUnit] = []
    for now in range(10):
        scheduler.admit()
        unit = scheduler.next_unit(float(now))
        if isinstance(unit, ForwardUnit):
            units.append(unit)
            scheduler.record_launch(unit, float(now))
            scheduler.record_done(unit, 0.1, float(now))
            for row in unit.sampling:
                row.tokens.append(0)
                if not row.may_sample:
                    scheduler.finish(row)
    scheduler.check_integrity()
    assert chunks(units) == [3], "the prompt is computed once"
    assert all(row.status is SequenceStatus.FINISHED and len(row.tokens) == 5 for row in rows)


class SchedulerMachine(RuleBasedStateMachine):
    """Random add, abort and step against a small memory: rows and memory agree, and every sequence ends."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(budget=300, max_rows=5, max_batched_tokens=32)
        self.alive: list[Sequence] = []

    @rule(
        tokens=st.integers(1, 120), max_tokens=st.integers(1, 60), n=st.integers(1, 3), work=st.sampled_from(WorkClass)
    )
    def add(self, tokens: int, max_tokens: int, n: int, work: WorkClass) -> None:
        group = PromptGroup()
        self.alive += [self.driver.add(tokens, max_tokens, group, work_class=work) for _ in range(n)]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        if sequence.status is not SequenceStatus.FINISHED:
            self.driver.scheduler.finish(sequence)
        self.alive.remove(sequence)

    @rule(staging=st.integers(0, 3), micro_steps=st.integers(0, 3))
    def beside(self, staging: int, micro_steps: int) -> None:
        self.driver.staging += staging
        self.driver.micro_steps += micro_steps

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @invariant()
    def rows_and_memory_agree(self) -> None:
        live = self.driver.scheduler.live
        assert set(self.driver.memory.held) == set(live)
        assert sum(self.driver.memory.held.values()) <= 300
        for sequence in live:
            assert sequence.computed <= self.driver.memory.held[sequence]

    def teardown(self) -> None:
        self.driver.run()
        assert all(s.status is SequenceStatus.FINISHED for s in self.alive)
        assert not self.driver.memory.held
        assert self.driver.staging == self.driver.micro_steps == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
