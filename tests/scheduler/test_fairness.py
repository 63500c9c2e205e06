"""The rows of the batch between API keys, and between the adapters of a key: turns, shares, and no starvation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.engine.budget import ROW_TOKENS
from mlx_parallm.engine.sequence import Sequence, SequenceStatus
from mlx_parallm.engine.units import ForwardUnit

ONE, TWO = AdapterRef("one", 1), AdapterRef("two", 1)


def tokens_by(driver: Driver, name: Callable[[Sequence], object], steps: int) -> Counter[object]:
    """The tokens that the next steps compute, by the name of what they are for."""
    counts: Counter[object] = Counter()
    for _ in range(steps):
        if isinstance(unit := driver.step(), ForwardUnit):
            for span in unit.spans:
                counts[name(span.row)] += span.tokens
    return counts


def by_key(sequence: Sequence) -> object:
    return sequence.key


def flood(driver: Driver, count: int, key: str, tokens: int = 40, max_tokens: int = 50, **fields: object) -> None:
    for _ in range(count):
        driver.add(tokens, max_tokens, key=key, **fields)


@pytest.mark.parametrize("tokens", [5, 300])
def test_a_key_without_a_row_gets_one_at_once(tokens: int) -> None:
    """Beside a flood that holds all rows and all places in prefill: the next unit has the other key's prompt."""
    driver = Driver(max_rows=16)
    flood(driver, 60, "flood", tokens=300, max_tokens=400)
    for _ in range(3):
        driver.step()
    other = driver.add(tokens, max_tokens=3, key="other")
    unit = driver.step()
    assert isinstance(unit, ForwardUnit)
    assert other in [chunk.row for chunk in unit.chunks]
    units = 1
    while other.sampled == 0:
        driver.step()
        units += 1
    assert units <= 2 + tokens // 64
    assert driver.scheduler.preemptions <= 1
    while other not in driver.finished:
        driver.step()


def test_equal_keys_get_equal_tokens_whatever_their_requests_are_like() -> None:
    driver = Driver(max_rows=8)
    flood(driver, 60, "prompts", tokens=200, max_tokens=5)
    flood(driver, 60, "answers", tokens=5, max_tokens=100)
    got = tokens_by(driver, by_key, 500)
    assert {"prompts", "answers"} <= {s.key for s in driver.scheduler.sequences()}, "both still wait"
    assert 0.4 <= got["prompts"] / got.total() <= 0.6
    begun = sum(sequence.key == "prompts" for sequence in driver.finished)
    assert driver.scheduler.preemptions <= begun + 1, "at most one row for each turn of the key that holds none"


@pytest.mark.parametrize("keys", [3, 8])
def test_the_shares_of_several_keys(keys: int) -> None:
    driver = Driver(max_rows=8)
    for number in range(keys):
        flood(driver, 30, f"key-{number}", max_tokens=20 + 5 * number)
    got = tokens_by(driver, by_key, 400)
    assert all(0.7 <= got[f"key-{number}"] * keys / got.total() <= 1.3 for number in range(keys)), got


def test_more_requests_and_more_adapters_give_a_key_no_more() -> None:
    driver = Driver(max_rows=8)
    for adapter in ("a", "b", "c", "d"):
        flood(driver, 50, "many", adapter=AdapterRef(adapter, 1))
    flood(driver, 60, "few")
    got = tokens_by(driver, by_key, 400)
    assert driver.scheduler.waiting > 0
    assert 0.4 <= got["few"] / got.total() <= 0.6


def test_the_adapters_of_a_key_get_equal_tokens() -> None:
    driver = Driver(max_rows=8)
    flood(driver, 100, "key", adapter=ONE)
    flood(driver, 60, "key", max_tokens=20, adapter=TWO)
    got = tokens_by(driver, lambda sequence: sequence.adapter, 300)
    assert {ONE, TWO} == {s.adapter for s in driver.scheduler.sequences() if s.status is SequenceStatus.WAITING}
    assert 0.4 <= got[TWO] / got.total() <= 0.6


def test_nobody_saves_up_what_it_did_not_use() -> None:
    """A key that was idle gets no more than its share afterwards, and neither does one that has used little."""
    driver = Driver(max_rows=8)
    flood(driver, 150, "busy")
    for number in range(400):
        if number % 100 == 0:
            driver.add(10, 5, key="late")
        driver.step()
    flood(driver, 80, "late")
    tokens_by(driver, by_key, 60)
    got = tokens_by(driver, by_key, 300)
    assert 0.4 <= got["busy"] / got.total() <= 0.6


def test_priority_comes_before_fairness() -> None:
    driver = Driver(max_rows=4)
    flood(driver, 20, "urgent", priority=-1)
    other = driver.add(40, key="other")
    for _ in range(1000):
        driver.step()
        if other.status is not SequenceStatus.WAITING:
            break
    urgent = [s for s in driver.scheduler.sequences() if s.key == "urgent" and s.status is SequenceStatus.WAITING]
    assert not urgent


def test_one_key_alone_keeps_the_order_of_urgency() -> None:
    driver = Driver(max_rows=1)
    lengths = [50, 20, 40, 10, 60, 30]
    for length in lengths:
        driver.add(length, max_tokens=1, key="only")
    driver.run()
    assert [sequence.prompt_length for sequence in driver.finished] == sorted(lengths)


REQUESTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 400), st.integers(1, 30), st.sampled_from([ONE, TWO])),
    min_size=5,
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, rows=st.integers(2, 6), budget=st.sampled_from([10**9, 1500]))
def test_every_key_gets_on_and_everything_ends(
    requests: list[tuple[str, int, int, AdapterRef]], rows: int, budget: int
) -> None:
    """After each pass of admission, no key waits without a row while another one holds two, unless memory is short.
    Everything that was asked for ends."""
    driver = Driver(budget=budget, max_rows=rows)
    for number, (key, tokens, max_tokens, adapter) in enumerate(requests):
        driver.add(tokens, max_tokens, key=key, adapter=adapter)
        if number % 3 == 0:
            driver.step()
        driver.scheduler.admit()
        held = Counter(row.key for row in driver.scheduler.live)
        without = {s.key for s in driver.scheduler.sequences()} - set(held)
        if budget > 10**6 and without and not driver.unread:
            assert max(held.values()) < 2, (held, without)
    driver.run()
    assert len(driver.finished) == len(requests)


# ---- rows that are taken back ----------------------------------------------------------------------


def held(driver: Driver) -> Counter[str]:
    return Counter(row.key for row in driver.scheduler.live)


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("before", [5, 200])
def test_a_key_that_comes_later_has_its_share_soon(rows: int, before: int) -> None:
    """However long the answers of the other key are, and however long it was alone."""
    driver = Driver(max_rows=rows)
    flood(driver, 2 * rows, "first", tokens=10, max_tokens=5000)
    for _ in range(before):
        driver.step()
    flood(driver, 2 * rows, "later", tokens=10, max_tokens=5000)
    tokens_by(driver, by_key, 130)
    got = tokens_by(driver, by_key, 100)
    assert 0.4 <= got["later"] / got.total() <= 0.6, held(driver)
    assert abs(held(driver)["later"] - rows / 2) <= 1
    assert driver.scheduler.preemptions <= rows / 2


def test_rows_of_a_better_priority_are_not_taken() -> None:
    driver = Driver(max_rows=8)
    flood(driver, 16, "urgent", max_tokens=5000, priority=-1)
    for _ in range(20):
        driver.step()
    flood(driver, 16, "later", max_tokens=5000)
    tokens_by(driver, by_key, 100)
    assert held(driver) == {"urgent": 8}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 90), st.integers(1, 200)), min_size=8, max_size=25))
def test_a_row_is_not_taken_twice_in_a_row(requests: list[tuple[str, int, int]]) -> None:
    """Between two times, it samples `ROW_TOKENS` more, unless it is for the first row of a key. All requests end."""
    driver = Driver(max_rows=6)
    taken: dict[Sequence, int] = {}
    preempt = driver.scheduler.preempt

    def noted(row: Sequence) -> None:
        if set(held(driver)) == {s.key for s in driver.scheduler.sequences()}:
            assert row.sampled >= taken.get(row, 0)
        taken[row] = row.sampled + ROW_TOKENS
        preempt(row)

    driver.scheduler.preempt = noted  # type: ignore[method-assign]
    for number, (key, tokens, max_tokens) in enumerate(requests):
        driver.add(tokens, max_tokens, key=key)
        for _ in range(number % 5):
            driver.step()
    driver.run()
    assert len(driver.finished) == len(requests)
