"""Many comparisons of two versions at once: what `extras.competition` computes, in NumPy, one column for each."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.config import CompetitionConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.extras.competition.comparison import LiveComparison
from mlx_parallm.extras.competition.evidence import BETS, Contrast

LEAST_WEIGHT = 1 / 32
VERDICTS = ("", "promoted", "withdrawn", "no_difference")


@dataclass(frozen=True, slots=True)
class Requests:
    """What comes, in order [requests, comparisons]: whether the candidate answers, and the rewards."""

    candidate: NDArray[np.bool_]
    rewards: NDArray[np.float64]


def thumbs(share: float, drift: float, difference: float, runs: int, settings: CompetitionConfig) -> Requests:
    """Rewards of -1 or 1. The part of 1 moves by `drift` over the requests that `max_rewards` of the candidate take,
    around 0.5; of the candidate's, `difference` more are 1."""
    usual = settings.max_rewards / share
    count = int(1.2 * usual) + 200
    dice = np.random.default_rng(0)
    candidate = dice.random((count, runs)) < share
    good = 0.5 + drift * (np.arange(count)[:, None] / usual - 0.5) + difference * candidate
    return Requests(candidate, np.where(dice.random((count, runs)) < good, 1.0, -1.0))


def ends(requests: Requests, settings: CompetitionConfig) -> tuple[list[str], list[int]]:
    """The verdicts, and after how many requests they came."""
    runs = requests.rewards.shape[1]
    contrast = Contrast(settings.share, settings.lowest_reward, settings.highest_reward)
    bound = np.array([0.0, 0.0, *[-settings.smallest_effect * contrast.scale] * 2])[:, None, None]
    bets = np.array(BETS)[None, :, None] / (1 + bound)  # [above, below, under, over; bets; comparisons]
    sign = np.array([1.0, -1.0, -1.0, 1.0])[:, None, None]
    capitals, reached = np.ones((4, len(BETS), runs)), np.zeros((4, runs), bool)
    mean, rewarded = np.full(runs, (settings.lowest_reward + settings.highest_reward) / 2), np.zeros(runs, int)
    verdict, at = np.zeros(runs, int), np.zeros(runs, int)
    for number, (candidate, reward) in enumerate(zip(requests.candidate, requests.rewards, strict=True), 1):
        centred = reward - mean
        mean = mean + max(1 / (number + 1), LEAST_WEIGHT) * centred
        value = centred * np.where(candidate, contrast.of_candidate, contrast.of_live)
        capitals *= 1 + bets * (sign * value - bound)
        reached |= capitals.mean(axis=1) >= 2 / settings.error_rate
        rewarded += candidate
        found = np.select([reached[0], reached[1], reached[2] & reached[3]], [1, 2, 3], 0)
        found = np.where((found == 0) & (rewarded >= settings.max_rewards), 3, found)
        new = (verdict == 0) & (found > 0)
        verdict[new], at[new] = found[new], number
        if verdict.all():
            break
    return [VERDICTS[each] for each in verdict], at.tolist()


def ends_of_the_server(requests: Requests, settings: CompetitionConfig, runs: int) -> Iterator[tuple[str, int]]:
    """The ends of the first comparisons, by the server's own code."""
    for column in range(runs):
        comparison = LiveComparison(AdapterRef("default", 1), AdapterRef("default", 2), settings)
        pairs = zip(requests.rewards[:, column].tolist(), requests.candidate[:, column].tolist(), strict=True)
        outcomes = ((comparison.add(reward, candidate), number) for number, (reward, candidate) in enumerate(pairs, 1))
        yield next((outcome.verdict, number) for outcome, number in outcomes if outcome is not None)
