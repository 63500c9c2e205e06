"""The scheduler alone: a pure-Python memory, a clock that the test holds."""

from __future__ import annotations

import pytest
from driver import STEP, Driver
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_parallm.core import AdapterRef, PromptGroup, SequenceState, SequenceStatus, WorkClass
from mlx_parallm.scheduler.prefill import CostModel
from mlx_parallm.scheduler.scheduler import RLAwareScheduler
from mlx_parallm.scheduler.units import Chunk, DecodeUnit, PrefillUnit, StagingUnit

ABSENT = AdapterRef("absent", 1)


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
        if isinstance(driver.step(), DecodeUnit):
            gaps.append(driver.now - since)
            since = driver.now
    assert max(gaps) <= 1.2 * STEP
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


def test_staging_counts_as_waiting_for_prefill() -> None:
    """It stands in the same gap between two decode steps."""
    driver = Driver(max_decode_stall_s=0.2)
    driver.add(2, max_tokens=50)
    driver.step()
    driver.step()
    driver.scheduler.gap.add_staging(0.19)
    driver.add(3000)
    driver.scheduler.admit()
    assert isinstance(driver.scheduler.next_unit(driver.now), DecodeUnit)


def test_the_last_prompt_token_is_left_to_decode() -> None:
    driver = Driver()
    sequence = driver.add(100)
    units = driver.run()
    assert sum(u.tokens for u in units if isinstance(u, PrefillUnit)) == 99
    assert sum(isinstance(u, DecodeUnit) for u in units) == 4
    assert driver.finished == [sequence]


def test_decode_waits_no_longer_than_the_stall_allowance() -> None:
    """Between two decode steps prefill gets `max_decode_stall_s`, whatever is waiting."""
    driver = Driver(max_decode_stall_s=0.2, max_batched_tokens=10_000)
    driver.add(2, max_tokens=50)
    driver.step()
    driver.step()
    for _ in range(3):
        driver.add(3000)
    stalls, since = [], driver.now
    while driver.scheduler.live:
        unit = driver.step()
        if isinstance(unit, DecodeUnit) and len(driver.finished) == 0:
            stalls.append(driver.now - since - 0.05)
            since = driver.now
    assert max(stalls) <= 0.2 + 1e-9
    assert max(stalls) > 0.1, "and prefill does get its share"


def test_time_spent_on_admission_comes_off_the_allowance() -> None:
    driver = Driver(max_decode_stall_s=0.2, max_batched_tokens=10_000)
    driver.add(2, max_tokens=50)
    driver.step()
    driver.step()
    driver.add(3000)
    driver.scheduler.admit()
    driver.scheduler.gap.add_wait_time(0.5)
    assert isinstance(driver.step(), DecodeUnit)
    assert isinstance(driver.step(), PrefillUnit)


def test_attention_makes_late_chunks_shorter() -> None:
    driver = Driver(cost=CostModel(0.01, 1e-4, 1e-6), max_decode_stall_s=0.1, max_batched_tokens=10_000)
    driver.add(4000, max_tokens=1)
    chunks = [u.tokens for u in driver.run() if isinstance(u, PrefillUnit)]
    assert chunks[0] > 4 * chunks[-2]
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)


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
    assert isinstance(first, PrefillUnit)
    assert [part.sequence for part in first.parts] == [urgent]


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


def test_short_prompts_share_a_unit() -> None:
    driver = Driver(max_batched_tokens=100)
    for length in (30, 40, 25, 60):
        driver.add(length + 1)
    first = driver.step()
    assert isinstance(first, PrefillUnit)
    assert [part.tokens for part in first.parts] == [25, 30, 40], "the shortest first, and none cut below 16 tokens"


def test_a_scored_prompt_has_units_of_its_own() -> None:
    driver = Driver(max_batched_tokens=1000, cost=CostModel(0.01, 1e-4, 1e-8))
    driver.add(21)
    driver.add(601, scored=True)
    driver.add(31)
    units = [u for u in driver.run() if isinstance(u, PrefillUnit)]
    scored = [u for u in units if u.parts[0].tokens > 31]
    assert [len(u.parts) for u in scored] == [1, 1, 1]
    assert max(u.tokens for u in scored) == 256


def test_a_group_is_prefilled_once_and_forked() -> None:
    driver = Driver()
    group = PromptGroup()
    members = [driver.add(400, group=group) for _ in range(4)]
    units = driver.run()
    assert sum(u.tokens for u in units if isinstance(u, PrefillUnit)) == 399
    assert set(driver.finished) == set(members)


def test_preempted_rows_are_recomputed_and_the_oldest_is_kept() -> None:
    driver = Driver(budget=120)
    rows = [driver.add(30, max_tokens=40) for _ in range(3)]
    driver.run()
    assert driver.scheduler.preemptions > 0
    assert driver.finished[0] is rows[0]
    assert set(driver.finished) == set(rows)


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-4), st.integers(0, 8000), st.floats(0.001, 3))
@settings(max_examples=200)
def test_the_largest_chunk_within_a_time_is_the_largest(
    fixed: float, per_token: float, per_pair: float, context: int, seconds: float
) -> None:
    cost = CostModel(fixed, per_token, per_pair)
    tokens = cost.tokens_within(seconds, [Chunk(20, 3)], context, 16, 2048)
    assert tokens == 16 or cost.seconds([Chunk(20, 3), Chunk(tokens, context)]) <= seconds
    assert tokens == 2048 or cost.seconds([Chunk(20, 3), Chunk(tokens + 1, context)]) > seconds


def test_a_scheduler_with_its_defaults_runs_without_an_engine() -> None:
    scheduler = RLAwareScheduler()
    group = PromptGroup()
    rows = [SequenceState(number, [1, 2, 3], 2, 0.0, group) for number in range(2)]
    for row in rows:
        scheduler.add(row)
    units = []
    for now in range(10):
        scheduler.admit()
        units.append(unit := scheduler.next_unit(float(now)))
        if isinstance(unit, PrefillUnit):
            scheduler.record_prefill(unit, 0.1, float(now))
        elif isinstance(unit, DecodeUnit):
            scheduler.record_launch(unit, float(now))
            for row in unit.sequences:
                row.tokens.append(0)
                if not row.may_draw:
                    scheduler.finish(row)
    scheduler.check_integrity()
    assert sum(unit.tokens for unit in units if isinstance(unit, PrefillUnit)) == 2, "the prompt is computed once"
    assert all(row.status is SequenceStatus.FINISHED and len(row.tokens) == 5 for row in rows)


class SchedulerMachine(RuleBasedStateMachine):
    """Random add, abort and step against a small memory: rows and memory agree, and every sequence ends."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(budget=300, max_rows=5, max_batched_tokens=32)
        self.alive: list[SequenceState] = []

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
        assert set(self.driver.memory.held) == {s.sequence_id for s in live}
        assert sum(self.driver.memory.held.values()) <= 300
        for sequence in live:
            assert sequence.computed <= self.driver.memory.held[sequence.sequence_id]

    def teardown(self) -> None:
        self.driver.run()
        assert all(s.status is SequenceStatus.FINISHED for s in self.alive)
        assert not self.driver.memory.held
        assert self.driver.staging == self.driver.micro_steps == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
