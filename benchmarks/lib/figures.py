"""Figures over repeated runs, and the limits that they must keep to."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest value of several repeats."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 1) -> str:
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def spread(values: Iterable[float]) -> Spread:
    """The spread of the values; NaN, which keeps to no limit, if there are none."""
    ordered = sorted(values) or [math.nan]
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def percentile(values: Iterable[float], percent: int) -> float:
    """The smallest value that at least `percent` percent of the values do not exceed; NaN if there are none."""
    ordered = sorted(values) or [math.nan]
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The spread of the ratios of paired repeats, in which a drift of the machine cancels."""
    return spread(mine / other if other else math.nan for mine, other in zip(ours, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure over its repeats.

    `judged` is the number compared with `limit`. A figure without a limit is only reported.
    """

    name: str
    unit: str
    value: Spread
    judged: float
    limit: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.limit is None:
            return None
        return self.judged >= self.limit if self.at_least else self.judged <= self.limit


def errors(name: str, count: int) -> Figure:
    """A figure that must be 0."""
    return Figure(name, "", *reported([count]), limit=0)


def reported(values: list[float]) -> tuple[Spread, float]:
    """The spread of the values, and their median as the number compared with the limit."""
    taken = spread(values)
    return taken, taken.median
