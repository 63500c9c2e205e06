"""Rows that report many candidates at each token beside rows that do not."""

from __future__ import annotations

from driver import Driver

from mlx_parallm.core.candidates import TOP_LOGPROBS
from mlx_parallm.engine.units import ForwardUnit

MANY = 50_000


def test_one_row_with_many_candidates_draws_in_a_step_and_the_oldest_ends_first() -> None:
    driver = Driver(max_rows=8)
    many = [driver.add(5, max_tokens=4, candidates=MANY) for _ in range(3)]
    others = [driver.add(5, max_tokens=30, candidates=TOP_LOGPROBS) for _ in range(3)]
    units = [unit for unit in driver.run() if isinstance(unit, ForwardUnit)]
    assert all(sum(span.row.samples_alone for span in unit.rows) <= 1 for unit in units)
    assert all(sum(span.row.samples_alone for span in unit.chunks) <= 1 for unit in units)
    assert [each for each in driver.finished if each in many] == many
    steps = [unit for unit in units if others[0] in [span.row for span in unit.rows]]
    assert len(steps) == 29, "the others draw in every step"
    assert set(driver.finished) == {*many, *others}


def test_a_prompt_with_many_candidates_is_scored_in_short_chunks() -> None:
    driver = Driver()
    beside = driver.add(5, max_tokens=60)
    driver.add(40, max_tokens=0, scored=True, prompt_candidates=MANY)
    chunks = [chunk for unit in driver.run() if isinstance(unit, ForwardUnit) for chunk in unit.chunks]
    assert all(chunk.tokens == 1 for chunk in chunks if chunk.row.scored)
    assert beside in driver.finished
