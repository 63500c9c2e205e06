"""One figure of this engine beside another one, and the rounds in which the two take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Measure = Callable[[int], Awaitable[float]]
"""The round's number → tokens a second. Each round has prompts of its own, so nothing comes from a prefix cache."""


@dataclass(slots=True)
class Comparison:
    """A rate in tokens a second on both sides, one value for each round.

    Attributes:
        name: what is measured.
        beside: what the other side is, such as mlx-lm with the same model.
        rounds: how many are wanted.
    """

    name: str
    beside: str
    rounds: int
    measure_ours: Measure
    measure_other: Measure
    ours: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    _slowest_s: float = 0.0
    _warm: bool = False

    @property
    def cut(self) -> bool:
        """Whether rounds are missing."""
        return len(self.ours) < self.rounds

    def fits(self, until: float) -> bool:
        """Whether another round is over by `until`, if it is as slow as the slowest that counted. `until`: on the clock
        of `time.monotonic`."""
        return time.monotonic() + self._slowest_s < until

    async def take_turns(self, number: int) -> None:
        """One round. The sides take turns in going first, so that a drift of the machine cancels. The first round
        compiles kernels and lets memory grow, and does not count."""
        started = time.monotonic()
        if number % 2:
            theirs, ours = await self.measure_other(number), await self.measure_ours(number)
        else:
            ours, theirs = await self.measure_ours(number), await self.measure_other(number)
        if self._warm:
            self._slowest_s = max(self._slowest_s, time.monotonic() - started)
            self.ours.append(ours)
            self.other.append(theirs)
        self._warm = True

    @property
    def ratios(self) -> list[float]:
        """This engine's rate over the other one in each round, sorted."""
        return sorted(ours / theirs for ours, theirs in zip(self.ours, self.other, strict=True))

    def as_json(self) -> dict[str, Any]:
        """For the report's file. What was not measured is null."""
        ratios = self.ratios
        spread = {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]} if ratios else None
        return {
            "name": self.name,
            "unit": "tokens/s",
            "ours": statistics.median(self.ours) if self.ours else None,
            "other": statistics.median(self.other) if self.other else None,
            "ratio": spread,
            "beside": self.beside,
            "rounds_wanted": self.rounds,
            "rounds": {"ours": self.ours, "other": self.other},
        }


async def compare(comparisons: Sequence[Comparison], until: float) -> None:
    """Runs the rounds. Each round has all comparisons, so that a budget that ends early costs rounds, not figures."""
    for number in range(1 + max(each.rounds for each in comparisons)):
        for each in comparisons:
            if each.cut and each.fits(until):
                await each.take_turns(number)
