"""The cost model's scale follows the machine, by all forward units."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.budget import Chunk, CostModel

PROMPT, ROWS = [Chunk(100, 0)], [Chunk(1, 50)] * 4


class Machine:
    """Runs units so many times slower than calibrated, each as soon as the last one has ended."""

    def __init__(self) -> None:
        self.cost = CostModel(0.01, 0.001, 1e-6, per_sample=0.002)
        self.calibrated = CostModel(0.01, 0.001, 1e-6, per_sample=0.002)
        self.now = 0.0

    def run(self, chunks: list[Chunk], samples: int, slower: float, times: int = 1) -> None:
        for _ in range(times):
            seconds = slower * self.calibrated.seconds(chunks, samples)
            self.now += seconds
            self.cost.observe(chunks, samples, seconds, self.now)

    def prefill(self, slower: float, times: int = 1) -> None:
        self.run(PROMPT, 0, slower, times)

    def decode(self, slower: float, times: int = 1) -> None:
        self.run(ROWS, len(ROWS), slower, times)

    def draft(self, slower: float) -> None:
        """A unit of the same rows with 4 tokens of drafts, so many times slower than one without."""
        seconds = slower * self.calibrated.seconds(ROWS, len(ROWS))
        self.now += seconds
        self.cost.observe(ROWS, len(ROWS), seconds, self.now, self.cost.growth(4, 8))


def test_the_scale_follows_prefill() -> None:
    machine = Machine()
    machine.prefill(3.0, times=40)
    assert machine.cost.seconds([Chunk(50, 0)]) == pytest.approx(3 * machine.calibrated.seconds([Chunk(50, 0)]), 0.01)


@pytest.mark.parametrize(("before", "after"), [(1.0, 6.0), (6.0, 1.0)])
def test_decode_rows_alone_correct_the_scale(before: float, after: float) -> None:
    """Other processes take the cores, or leave them, while no prompt comes."""
    machine = Machine()
    for _ in range(40):
        machine.decode(before)
        machine.run(ROWS + PROMPT, len(ROWS), before)
    machine.decode(after, times=30)
    calibrated = machine.calibrated
    assert machine.cost.seconds(ROWS, 4) == pytest.approx(after * calibrated.seconds(ROWS, 4), rel=0.05)
    assert machine.cost.seconds(PROMPT) == pytest.approx(after * calibrated.seconds(PROMPT), rel=0.2)


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


@pytest.mark.parametrize("measured", [0.25, 1.0, 4.0])
def test_terms_that_were_measured_wrongly_are_corrected(measured: float) -> None:
    """Other programs disturbed the start, so that a token seemed to take so many times as long as it does. The machine
    itself is noisy, and its speed changes."""
    machine, noise = Machine(), random.Random(3)
    machine.cost = CostModel(0.01, 0.001 * measured, 1e-6 * measured, per_sample=0.002)
    for _ in range(40):
        slower = noise.choice([1.0, 2.0])
        for _ in range(10):
            machine.decode(slower * noise.uniform(0.8, 1.2))
        machine.run(ROWS + PROMPT, len(ROWS), slower * noise.uniform(0.8, 1.2))
    machine.decode(1.0, times=20)
    assert machine.cost.chunk_seconds(PROMPT[0]) == pytest.approx(machine.calibrated.chunk_seconds(PROMPT[0]), rel=0.35)
    assert machine.cost.seconds(ROWS, len(ROWS)) == pytest.approx(machine.calibrated.seconds(ROWS, len(ROWS)), rel=0.05)


def test_a_few_rows_take_what_was_measured_and_chunks_are_not_thought_slower_for_it() -> None:
    """On this GPU, products of 8 rows take three times as long as of one, and of 32 or 100 hardly more."""
    cost = CostModel(0.01, 0.0001, 0.0, steps=((1, 0.0101), (8, 0.030), (32, 0.032)))
    rows = [Chunk(1, 50)] * 8
    assert cost.seconds(rows, 8) == pytest.approx(0.030)
    assert cost.seconds([*rows, Chunk(100, 0)], 8) == pytest.approx(0.01 + 108 * 0.0001)
    for now in range(100):
        cost.observe(rows, 8, 0.030, 0.03 * now)
    assert cost.chunk_seconds(Chunk(100, 0)) == pytest.approx(100 * 0.0001, rel=0.01)


@given(
    *(st.floats(1e-4, 0.02), st.floats(1e-6, 1e-3), st.floats(0, 1e-3), st.floats(1e-4, 0.02)),
    *(st.integers(1, 40), st.floats(0.1, 10.0)),
)
def test_no_unit_takes_less_than_no_time(
    fixed: float, per_token: float, per_sample: float, step: float, tokens: int, chunk_scale: float
) -> None:
    """A start beside other programs can measure any of the terms several times too long."""
    cost = CostModel(fixed, per_token, 0.0, per_sample, chunk_scale=chunk_scale, steps=((1, step), (32, step)))
    unit = [Chunk(tokens, 0)]
    assert cost.seconds(unit, 1) >= min(fixed, step)
    cost.observe(unit, 1, step, 1.0)
    assert cost._share is not None
    assert 0 <= cost._share <= 1
    assert cost.scale > 0


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-4), st.integers(0, 8000), st.floats(0.001, 3))
@settings(max_examples=200)
def test_the_largest_chunk_within_a_time_is_the_largest(
    fixed: float, per_token: float, per_pair: float, context: int, seconds: float
) -> None:
    cost = CostModel(fixed, per_token, per_pair)
    tokens = cost.tokens_within(seconds, context, 16, 2048)
    assert tokens == 16 or cost.chunk_seconds(Chunk(tokens, context)) <= seconds
    assert tokens == 2048 or cost.chunk_seconds(Chunk(tokens + 1, context)) > seconds


def test_drafts_that_cost_more_than_was_measured_are_left_off_and_tried_again() -> None:
    """A unit of 4 rows takes 1.5 times as long with 4 tokens of drafts, where the measured times say 1.1 times."""
    machine = Machine()
    machine.cost.steps = ((4, 0.022), (8, 0.0242))
    for _ in range(40):
        machine.decode(1.0)
        machine.draft(1.5)
    assert machine.cost.growth(4, 8) == pytest.approx(1.5, abs=0.05)
    assert machine.cost.growth(4, 4) == 1.0
    machine.decode(1.0, times=int(300 / machine.calibrated.seconds(ROWS, len(ROWS))))
    assert machine.cost.growth(4, 8) == pytest.approx(1.1, abs=0.01)


def test_a_machine_that_slows_down_makes_no_draft_dearer() -> None:
    machine = Machine()
    machine.cost.steps = ((4, 0.022), (8, 0.0242))
    for _ in range(20):
        machine.decode(1.0)
        machine.draft(1.1)
    for _ in range(40):
        machine.draft(3.3)
    assert machine.cost.growth(4, 8) == pytest.approx(1.1, abs=0.15)
    assert machine.cost.seconds(ROWS, 4) == pytest.approx(3 * machine.calibrated.seconds(ROWS, 4), rel=0.12)


def test_uneven_units_take_longer_by_what_was_measured() -> None:
    """A draft that costs no time otherwise; as in the first units of a server, before any was observed."""
    cost = CostModel(steps=((1, 0.01), (8, 0.01)), uneven=0.002)
    assert cost.growth(4, 5) == pytest.approx(1.2)
    assert cost.growth(4, 4) == 1.0


# -- what no longer fits ---------------------------------------------------------------------------


def test_after_sleep_the_first_unit_alone_sets_the_scale() -> None:
    """The clock stands still during sleep, so without `forget` the scale would look fresh."""
    machine = Machine()
    machine.decode(5.0, times=50)
    machine.draft(3.0)
    machine.cost.forget()
    machine.decode(1.0)
    assert machine.cost.scale == pytest.approx(1.0)
    assert machine.cost.growth_scale == pytest.approx(1.0)
