"""Thousands of waiting sequences: the cost of a pass of admission, and the order in which they are admitted."""

from __future__ import annotations

from collections import Counter

import pytest
from driver import Driver

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.sequence import PromptGroup, Sequence, SequenceStatus
from mlx_parallm.engine.waiting import WaitingQueue

LIVE, ROLLOUT = WorkClass.INFERENCE, WorkClass.TRAINING
ADAPTERS = [AdapterRef(name, 1) for name in ("one", "two", "three")]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts ranks, predictions and searches for the next sequence to admit."""
    counts: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def count(*arguments: object) -> object:
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, count)

    counted(WaitingQueue, "urgency")
    counted(WaitingQueue, "best")
    counted(CostModel, "chunk_seconds")
    return counts


def crowded(waiting: int) -> Driver:
    """64 rows fill the memory; so many sequences of three adapters and both classes wait for it."""
    driver = Driver(budget=64 * 61 + 10)
    for _ in range(64):
        driver.add(60, max_tokens=1000)
    driver.scheduler.admit()
    assert len(driver.scheduler.live) == 64
    for number in range(waiting):
        work_class = ROLLOUT if number % 2 else LIVE
        driver.add(200, adapter=ADAPTERS[number % 3], work_class=work_class)
    return driver


def test_a_pass_of_admission_costs_the_same_however_many_wait(work: Counter[str]) -> None:
    costs = []
    for waiting in (30, 4000):
        driver = crowded(waiting)
        driver.scheduler.admit()
        work.clear()
        for _ in range(10):
            driver.now += 1.0
            driver.scheduler.admit()
        assert len(driver.scheduler.live) == 64
        costs.append(work.copy())
    assert costs[0] == costs[1]
    assert costs[1]["urgency"] == costs[1]["chunk_seconds"] == 0, "ranks are kept"
    assert costs[1]["best"] == 10


def test_aborting_thousands_ranks_none_of_them(work: Counter[str]) -> None:
    driver = crowded(4000)
    driver.scheduler.admit()
    work.clear()
    for sequence in list(driver.scheduler.sequences()):
        if sequence.status is SequenceStatus.WAITING:
            driver.scheduler.finish(sequence)
    assert driver.scheduler.waiting == 0
    assert not work
    driver.scheduler.check_integrity()


def admitted(driver: Driver) -> list[Sequence]:
    """All that wait, in the order in which they get the only row."""
    order: list[Sequence] = []
    while driver.scheduler.sequences():
        driver.step()
        order += [sequence for sequence in driver.scheduler.live if sequence not in order]
    return order


def test_the_order_is_priority_then_least_left_less_age() -> None:
    driver = Driver(max_rows=1, cost=CostModel(0.0, 0.01, 0.0))
    waited = driver.add(1001, max_tokens=1)  # 10 s of prefill
    driver.now += 0.5  # which make up for 5 s
    shorter = driver.add(401, max_tokens=1)
    longer = driver.add(601, max_tokens=1)
    low = driver.add(2, max_tokens=1, priority=1)
    high = driver.add(901, max_tokens=1, priority=-1)
    assert admitted(driver) == [high, shorter, waited, longer, low]


def test_the_rest_of_a_group_is_admitted_when_its_leader_is_aborted() -> None:
    driver = Driver(max_batched_tokens=16)
    group = PromptGroup()
    leader, *others = [driver.add(100, group=group) for _ in range(4)]
    driver.step()
    assert [s.status for s in others] == [SequenceStatus.WAITING] * 3
    driver.scheduler.finish(leader)
    driver.run()
    assert set(driver.finished) == set(others)
