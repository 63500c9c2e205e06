"""Sequential tests of two versions by their rewards. They may be looked at after every reward: stopping early, or going
on for longer, does not raise their error rates.

Each hypothesis is tested by betting against it. The capital of somebody who bets against a true hypothesis is a
nonnegative supermartingale, because every bet is fair or loses on average. By Ville's inequality it ever reaches 1 / a
with probability at most a. Sources: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting"
(JRSS B, 2024), for the bets on bounded means; Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric,
nonasymptotic confidence sequences" (Annals of Statistics, 2021), section 4.2, for differences of rewards whose version
is chosen at random.

Rewards may drift, and need not be of any distribution. Each of them is compared with the running mean before it, and
never with an old reward of the other version; see `Contrast`.
"""

from __future__ import annotations

from enum import StrEnum

BETS = tuple(0.9 * 0.65**power for power in range(12))
"""Shares of the largest bet that cannot lose everything. The capital is spread over all of them at the start."""

_NEWEST_WEIGHT = 1 / 32
"""Least weight of the newest reward in the running mean."""


class Verdict(StrEnum):
    """What the rewards show about the candidate."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"


class Capital:
    """Bets against the hypothesis that the mean of values from -1 to 1 is at most `bound`, which is above -1."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._bets = [share / (1 + bound) for share in BETS]
        self._capitals = [1.0] * len(BETS)

    def observe(self, value: float) -> float:
        """Returns the capital after the bets on the next value. At the start it was 1."""
        gain = value - self._bound
        self._capitals = [capital * (1 + bet * gain) for capital, bet in zip(self._capitals, self._bets, strict=True)]
        return sum(self._capitals) / len(BETS)


class DifferenceTest:
    """Whether the mean of differences from -1 to 1 is above 0, below 0, or within `smallest` of 0.

    With `error_rate` a, however long it goes on:
    - a mean of 0 is called better or worse with probability at most a;
    - a positive mean is called worse, and a negative one better, with probability at most a / 2;
    - a mean of at least `smallest` away from 0 is called equivalent with probability at most a / 2.
    """

    def __init__(self, error_rate: float, smallest: float) -> None:
        self._enough = 2 / error_rate
        self._above = Capital(0.0)  # bets that the mean is above 0; against "at most 0"
        self._below = Capital(0.0)  # of the negated differences
        self._under_smallest = Capital(-smallest)  # against "at least `smallest`", of the negated differences
        self._over_smallest = Capital(-smallest)  # against "at most -`smallest`"
        self._largest_above = self._largest_below = 1.0
        self._is_under = self._is_over = False

    def observe(self, difference: float) -> Verdict | None:
        """Takes the next difference. Returns a verdict as soon as there is one."""
        self._largest_above = max(self._largest_above, self._above.observe(difference))
        self._largest_below = max(self._largest_below, self._below.observe(-difference))
        self._is_under |= self._under_smallest.observe(-difference) >= self._enough
        self._is_over |= self._over_smallest.observe(difference) >= self._enough
        if self._largest_above >= self._enough:
            return Verdict.BETTER
        if self._largest_below >= self._enough:
            return Verdict.WORSE
        return Verdict.EQUIVALENT if self._is_under and self._is_over else None

    @property
    def p_better(self) -> float:
        """The smallest error rate at which this test would have said by now that the mean is above 0."""
        return min(1.0, 2 / self._largest_above)

    @property
    def p_worse(self) -> float:
        """The same for a mean below 0."""
        return min(1.0, 2 / self._largest_below)


class Contrast:
    """Converts each reward to a value from -1 to 1 whose mean is `scale` times the difference of the versions' mean
    rewards: the candidate's minus the live version's.

    A reward r counts as (r - m) (1 - share) if the candidate got it, and as -(r - m) share if the live version did. m
    is the mean of both versions' last rewards, before r. Since chance decides who answers, the mean of that is
    share (1 - share) times the difference at this moment, whatever m is and however the rewards drift (Horvitz and
    Thompson, 1952). With a good m it varies little, and a share of rewards that differs from `share` matters little.

    Attributes:
        of_candidate, of_live: what r - m is multiplied by.

    Args:
        share: probability that the candidate answers.
        lowest, highest: all rewards are from one to the other.
    """

    def __init__(self, share: float, lowest: float, highest: float) -> None:
        largest = max(share, 1 - share) * (highest - lowest)
        self.scale = share * (1 - share) / largest
        self.of_candidate, self.of_live = (1 - share) / largest, -share / largest
        self._mean, self._count = (lowest + highest) / 2, 1

    def add(self, reward: float, candidate: bool) -> float:
        centred = reward - self._mean
        self._count += 1
        self._mean += max(1 / self._count, _NEWEST_WEIGHT) * centred
        return centred * (self.of_candidate if candidate else self.of_live)
