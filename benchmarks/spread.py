"""Figures of repeated runs."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of several repeats."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 1) -> str:
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def spread(values: Iterable[float]) -> Spread:
    """Of no values: not-a-number, which meets no limit."""
    ordered = sorted(values) or [math.nan]
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def percentile(values: Iterable[float], percent: int) -> float:
    """The least value that so many percent of them do not pass; not-a-number of none."""
    ordered = sorted(values) or [math.nan]
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of repeats taken in pairs, one beside the other, so that a drift of the machine cancels."""
    return spread(mine / other if other else math.nan for mine, other in zip(ours, theirs, strict=True))
