"""The pacer against simulated machines: no model, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from mlx_parallm.rl.pacing import Pacer, TokenCost

BUDGET = 0.5
FIXED, PER_SIZE = 0.03, 0.004


def machine(slower: float = 1.0, noise: float = 0.1, seed: int = 0) -> Callable[[int], float]:
    """Seconds of a micro-step of a size."""
    random = np.random.default_rng(seed)
    return lambda size: float(slower * (FIXED + PER_SIZE * size) * (1.0 + noise * random.uniform(-1, 1)))


def updates(pacer: Pacer, seconds_of: Callable[[int], float], count: int, seed: int = 0) -> Iterator[list[float]]:
    """Seconds of the micro-steps of each update: seven about as large as may be, and a rest. A sample has size 10."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        most = pacer.size_within(BUDGET)
        shares = [*random.uniform(0.8, 1.0, 7), random.uniform(0.1, 1.0)]
        sizes = [max(10, int(share * most)) for share in shares]
        taken = [seconds_of(size) for size in sizes]
        for size, seconds in zip(sizes, taken, strict=True):
            pacer.observe(size, seconds)
        yield taken


def wanted(slower: float = 1.0) -> float:
    return (0.85 * BUDGET / slower - FIXED) / PER_SIZE


@pytest.mark.parametrize("guess", [0.01, 0.1, 1.0, 30.0])
def test_it_learns_a_linear_machine_whatever_the_guess(guess: float) -> None:
    """Micro-steps come to take 0.85 of the budget and none overruns it, noise of a tenth and all."""
    pacer, seconds_of = Pacer(PER_SIZE * guess), machine()
    *_, last = updates(pacer, seconds_of, 12)
    for taken in [last, *updates(pacer, seconds_of, 12, seed=1)]:
        assert pacer.size_within(BUDGET) == pytest.approx(wanted(), rel=0.12)
        assert max(taken) <= BUDGET
        assert max(taken) >= 0.6 * BUDGET


def test_both_terms_are_learnt_from_unequal_sizes() -> None:
    """So that a budget of another size is kept to as well."""
    pacer, seconds_of = Pacer(PER_SIZE), machine(noise=0.02)
    for size in [10, 30, 80, 20, 50, 100] * 6:
        pacer.observe(size, seconds_of(size))
    assert pacer.seconds(10) == pytest.approx(FIXED + 10 * PER_SIZE, rel=0.1)
    assert pacer.seconds(200) == pytest.approx(FIXED + 200 * PER_SIZE, rel=0.1)
    assert pacer.size_within(0.2) == pytest.approx((0.85 * 0.2 - FIXED) / PER_SIZE, rel=0.15)


@pytest.mark.parametrize("slower", [3.0, 1 / 3])
def test_it_follows_a_machine_that_changes_its_speed(slower: float) -> None:
    pacer = Pacer(PER_SIZE)
    for _ in updates(pacer, machine(), 10):
        pass
    changed = machine(slower)
    first, *rest = updates(pacer, changed, 6)
    if slower > 1:
        assert max(first) > BUDGET, "it could not know"
    assert all(max(taken) <= 1.1 * BUDGET for taken in rest[2:])
    assert pacer.size_within(BUDGET) == pytest.approx(wanted(slower), rel=0.15)


def test_one_hiccup_does_not_last() -> None:
    pacer = Pacer(PER_SIZE)
    for _ in updates(pacer, machine(), 10):
        pass
    before = pacer.size_within(BUDGET)
    pacer.observe(before, 10.0)
    assert pacer.size_within(BUDGET) < before
    for _ in updates(pacer, machine(), 6):
        pass
    assert pacer.size_within(BUDGET) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize(
    "seen",
    [
        [(100, 0.4)] * 40,
        [(100, 0.4), (50, 0.8)] * 20,
        [(1, 1e-6), (1000, 3.0)] * 20,
        [(100, 0.5), (50, 0.1)] * 20,
        [(7, 0.0)],
    ],
)
def test_terms_stay_positive_whatever_is_observed(seen: list[tuple[int, float]]) -> None:
    pacer = Pacer(PER_SIZE)
    for size, seconds in seen:
        pacer.observe(size, seconds)
    times = [pacer.seconds(size) for size in (0, 1, 10, 100, 1000)]
    assert times[0] > 0
    assert all(more > less for less, more in pairwise(times))
    assert 1 <= pacer.size_within(BUDGET) <= 2 * max(size for size, _ in seen)


def test_a_size_that_was_always_the_same_is_predicted_as_it_was() -> None:
    pacer = Pacer(50 * PER_SIZE)
    for _ in range(30):
        pacer.observe(80, 0.4)
    assert pacer.seconds(80) == pytest.approx(0.4, rel=1e-3)


def test_a_size_grows_by_twice_at_most() -> None:
    """A small update on a fast machine says little of a large one."""
    pacer = Pacer(PER_SIZE)
    pacer.observe(20, 1e-3)
    assert pacer.size_within(BUDGET) == 40


def test_the_first_size_depends_on_nothing_observed_and_is_careful() -> None:
    slow, fast = Pacer(0.01), Pacer(1e-7)
    first = slow.first_size(BUDGET)
    assert first == slow.size_within(BUDGET) == int((0.85 * BUDGET) / 0.01 - 16)
    slow.observe(500, 0.01)
    assert slow.first_size(BUDGET) == first != slow.size_within(BUDGET)
    assert fast.first_size(BUDGET) == 256


def test_a_budget_that_holds_nothing_leaves_one() -> None:
    pacer = Pacer(PER_SIZE)
    assert pacer.first_size(1e-6) == 1
    pacer.observe(10, 1.0)
    assert pacer.size_within(1e-6) == 1


def test_a_trained_position_costs_its_share_of_the_head() -> None:
    """Head: forward, again in the backward pass, and backward. Trunk: forward, backward, and again if checkpointed."""
    assert TokenCost.of(100, 50, checkpointed=True, reference=False) == TokenCost(300.0, 150.0)
    assert TokenCost.of(100, 50, checkpointed=False, reference=True) == TokenCost(300.0, 200.0)
    assert TokenCost.of(100, 50, checkpointed=True, reference=True).target_size == pytest.approx(0.5)
