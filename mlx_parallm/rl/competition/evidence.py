"""Sequential tests of two versions by their rewards. They may be looked at after every reward: stopping early, or going
on for longer, does not raise their error rates.

Each hypothesis is tested by betting against it. The capital of somebody who bets against a true hypothesis is a
nonnegative supermartingale, because every bet is fair or loses on average. By Ville's inequality it ever reaches 1 / a
with probability at most a. Sources: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting"
(JRSS B, 2024), for the bets on bounded means; Turner, Ly and Grünwald, "Generic E-variables for exact sequential
k-sample tests that allow for optional stopping" (2024), for two samples in blocks of a fixed composition.

A block is one reward of the candidate and the mean of some rewards of the live version that came at about the same
time. The rewards may drift, and need not be of any distribution: only the mean difference of a block matters, given all
blocks before it.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum

BETS = tuple(0.9 * 0.65**power for power in range(12))
"""Shares of the largest bet that cannot lose everything. The capital is spread over all of them at the start."""

MOST_UNPAIRED = 1000
"""Rewards of one version that may wait for those of the other. Beyond it, the oldest are left out."""


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
        self._logs = [0.0] * len(BETS)

    def observe(self, value: float) -> None:
        gain = value - self._bound
        for place, bet in enumerate(self._bets):
            self._logs[place] += math.log1p(bet * gain)

    @property
    def log(self) -> float:
        """Logarithm of the capital; 0 at the start."""
        largest = max(self._logs)
        return largest + math.log(sum(math.exp(log - largest) for log in self._logs) / len(self._logs))


class DifferenceTest:
    """Whether the mean of differences from -1 to 1 is above 0, below 0, or within `smallest` of 0.

    With `error_rate` a, however long it goes on:
    - a mean of 0 is called better or worse with probability at most a;
    - a positive mean is called worse, and a negative one better, with probability at most a / 2;
    - a mean of at least `smallest` away from 0 is called equivalent with probability at most a / 2.
    """

    def __init__(self, error_rate: float, smallest: float) -> None:
        self._enough = math.log(2 / error_rate)
        self._above = Capital(0.0)  # bets that the mean is above 0; against "at most 0"
        self._below = Capital(0.0)  # of the negated differences
        self._under_smallest = Capital(-smallest)  # against "at least `smallest`", of the negated differences
        self._over_smallest = Capital(-smallest)  # against "at most -`smallest`"
        self._largest_above = self._largest_below = 0.0
        self._is_under = self._is_over = False

    def observe(self, difference: float) -> Verdict | None:
        """Takes the next difference. Returns a verdict as soon as there is one."""
        self._above.observe(difference)
        self._over_smallest.observe(difference)
        self._below.observe(-difference)
        self._under_smallest.observe(-difference)
        self._largest_above = max(self._largest_above, self._above.log)
        self._largest_below = max(self._largest_below, self._below.log)
        self._is_under |= self._under_smallest.log >= self._enough
        self._is_over |= self._over_smallest.log >= self._enough
        if self._largest_above >= self._enough:
            return Verdict.BETTER
        if self._largest_below >= self._enough:
            return Verdict.WORSE
        return Verdict.EQUIVALENT if self._is_under and self._is_over else None

    @property
    def p_better(self) -> float:
        """The smallest error rate at which this test would have said by now that the mean is above 0."""
        return min(1.0, 2 * math.exp(-self._largest_above))

    @property
    def p_worse(self) -> float:
        """The same for a mean below 0."""
        return min(1.0, 2 * math.exp(-self._largest_below))


class Blocks:
    """Differences of a candidate's rewards from those of the live version, each from one reward of the candidate and
    `live_per_block` of the other, in order of their arrival. They are scaled by `span`, so that they are from -1 to 1.
    """

    def __init__(self, live_per_block: int, span: float) -> None:
        self._of_live: deque[float] = deque(maxlen=MOST_UNPAIRED)
        self._of_candidate: deque[float] = deque(maxlen=MOST_UNPAIRED)
        self._wanted = live_per_block
        self._span = span

    def add(self, reward: float, candidate: bool) -> float | None:
        """Adds a reward. Returns the difference of the block that it completes."""
        (self._of_candidate if candidate else self._of_live).append(reward)
        if not self._of_candidate or len(self._of_live) < self._wanted:
            return None
        live = math.fsum(self._of_live.popleft() for _ in range(self._wanted)) / self._wanted
        return (self._of_candidate.popleft() - live) / self._span
