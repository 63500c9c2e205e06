"""The sequential test behind comparisons: its capital by hand, error rates by simulation, its use of rewards."""

from __future__ import annotations

import math
import random

import pytest

from mlx_parallm.extras.competition.evidence import BETS, Capital, Contrast, DifferenceTest, Verdict


def test_the_capital_is_the_mean_over_bets_of_the_products_of_gains() -> None:
    capital = Capital(0.2)
    values = (0.5, -1.0, 1.0, 0.2)
    *_, found = [capital.observe(value) for value in values]
    bets = [share / 1.2 for share in BETS]
    by_hand = sum(math.prod(1 + bet * (value - 0.2) for value in values) for bet in bets) / len(bets)
    assert found == pytest.approx(by_hand)


def test_a_fair_game_wins_nothing_on_average() -> None:
    """Over all eight ways that three fair coins can fall, the mean capital is exactly the one at the start."""
    capitals = []
    for coins in range(8):
        capital = Capital(0.0)
        *_, found = [capital.observe(1.0 if coins >> toss & 1 else -1.0) for toss in range(3)]
        capitals.append(found)
    assert sum(capitals) / 8 == pytest.approx(1.0)


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


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_the_mean_contrast_is_the_difference_of_the_versions_whatever_came_before(share: float) -> None:
    """The mean over who answers, the candidate with the probability `share`, for a reward of each."""
    for before in ([], [1.0] * 40, [-1.0, 1.0, 0.25]):
        of = {}
        for candidate, reward in ((True, 0.75), (False, -0.5)):
            contrast = Contrast(share, -1.0, 1.0)
            for place, earlier in enumerate(before):
                contrast.add(earlier, place % 2 == 0)
            of[candidate] = contrast.add(reward, candidate)
        assert share * of[True] + (1 - share) * of[False] == pytest.approx(contrast.scale * 1.25)


def drifting(share: float, seed: int, better: float = 0.0, drift: float = 0.8, rewards: int = 2000) -> Verdict | None:
    """The verdict on rewards of -1 or 1 of which ever more are 1; of the candidate's, `better` more."""
    dice, contrast = random.Random(seed), Contrast(share, -1.0, 1.0)
    test = DifferenceTest(0.05, 0.05 * contrast.scale)
    for number in range(rewards):
        candidate = dice.random() < share
        good = 0.5 + drift * (number / rewards - 0.5) + better * candidate
        if verdict := test.observe(contrast.add(1.0 if dice.random() < good else -1.0, candidate)):
            return verdict
    return None


@pytest.mark.parametrize("share", [0.1, 0.3, 0.4, 0.9])
@pytest.mark.parametrize("drift", [0.8, -0.8])
def test_a_drift_of_both_versions_is_no_difference_at_any_share(share: float, drift: float) -> None:
    """One wrong verdict of 20 is what the error rate allows on average."""
    found = [drifting(share, seed, drift=drift) for seed in range(12)]
    assert sum(verdict in (Verdict.BETTER, Verdict.WORSE) for verdict in found) <= 2


def test_a_difference_is_found_under_a_drift_in_either_direction() -> None:
    for drift in (0.8, -0.8):
        assert [drifting(0.4, seed, 0.3, drift) for seed in range(10)] == [Verdict.BETTER] * 10
        assert [drifting(0.4, seed, -0.3, drift) for seed in range(10)] == [Verdict.WORSE] * 10
