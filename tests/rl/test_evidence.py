"""The sequential test behind comparisons: its capital by hand, its error rates by simulation, its blocks."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from mlx_parallm.rl.competition.evidence import BETS, Blocks, Capital, DifferenceTest, Verdict


def test_the_capital_is_the_mean_over_bets_of_the_products_of_gains() -> None:
    capital = Capital(0.2)
    values = (0.5, -1.0, 1.0, 0.2)
    for value in values:
        capital.observe(value)
    bets = [share / 1.2 for share in BETS]
    by_hand = sum(math.prod(1 + bet * (value - 0.2) for value in values) for bet in bets) / len(bets)
    assert capital.log == pytest.approx(math.log(by_hand))


@pytest.mark.parametrize("bound", [-0.9, 0.0, 0.9])
def test_no_value_ruins_anybody(bound: float) -> None:
    capital = Capital(bound)
    for _ in range(1000):
        capital.observe(-1.0)
    assert math.isfinite(capital.log)
    assert capital.log < 0


def test_a_fair_game_wins_nothing_on_average() -> None:
    """Over all eight ways that three fair coins can fall, the mean capital is exactly the one at the start."""
    capitals = []
    for coins in range(8):
        capital = Capital(0.0)
        for toss in range(3):
            capital.observe(1.0 if coins >> toss & 1 else -1.0)
        capitals.append(math.exp(capital.log))
    assert sum(capitals) / 8 == pytest.approx(1.0)


def test_certain_differences_are_found_at_once() -> None:
    """With the largest bet each value of 1 multiplies a twelfth of the capital by 1.9: 40 is reached at the tenth."""
    test = DifferenceTest(0.05, 0.1)
    verdicts = [test.observe(1.0) for _ in range(12)]
    first = next(place for place, verdict in enumerate(verdicts) if verdict)
    assert 5 < first < 11
    assert verdicts[first] is Verdict.BETTER
    assert test.p_better <= 0.05 < test.p_worse


def ends(mean: float, seed: int, blocks: int, smallest: float = 0.2) -> Verdict | None:
    """The verdict on differences of this mean, of which each is -1, 0 or 1."""
    dice, test = random.Random(seed), DifferenceTest(0.05, smallest)
    for _ in range(blocks):
        better, worse = dice.random() < 0.5 + mean / 2, dice.random() < 0.5 - mean / 2
        if verdict := test.observe(float(better) - float(worse)):
            return verdict
    return None


def test_equal_versions_are_rarely_called_different_however_often_one_looks() -> None:
    different = sum(ends(0.0, seed, 300) in (Verdict.BETTER, Verdict.WORSE) for seed in range(400))
    assert different / 400 <= 0.05


def test_a_difference_is_found_in_its_direction() -> None:
    assert [ends(0.3, seed, 1000) for seed in range(50)] == [Verdict.BETTER] * 50
    assert [ends(-0.3, seed, 1000) for seed in range(50)] == [Verdict.WORSE] * 50


def test_equal_versions_are_called_equivalent_in_the_end() -> None:
    verdicts = [ends(0.0, seed, 1500) for seed in range(40)]
    assert verdicts.count(Verdict.EQUIVALENT) >= 36


def test_what_matters_is_rarely_called_equivalent() -> None:
    assert sum(ends(0.2, seed, 1500) is Verdict.EQUIVALENT for seed in range(100)) <= 5


def test_evidence_is_never_taken_back() -> None:
    test, seen = DifferenceTest(1e-6, 0.5), []
    for value in (0.9, 0.9, 0.9, -0.9, -0.9, -0.9):
        test.observe(value)
        seen.append(test.p_better)
    assert all(later <= earlier for earlier, later in pairwise(seen))


def test_a_block_is_one_reward_of_the_candidate_and_so_many_of_the_live_version() -> None:
    blocks = Blocks(live_per_block=2, span=2.0)
    given = [(0.0, False), (1.0, True), (1.0, False), (1.0, False), (1.0, False), (1.0, False), (0.0, True)]
    assert [blocks.add(*one) for one in given] == [None, None, 0.25, None, None, None, -0.5]


def test_rewards_that_wait_for_others_are_bounded() -> None:
    blocks = Blocks(live_per_block=1, span=1.0)
    for number in range(5000):
        blocks.add(float(number), candidate=False)
    assert blocks.add(4000.0, candidate=True) == 0.0
