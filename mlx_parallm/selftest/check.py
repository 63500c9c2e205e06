"""A check of the self-test, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.selftest.limits import Limit
from mlx_parallm.selftest.tested import TestedModel


@dataclass(frozen=True, slots=True)
class Outcome:
    """The largest difference that a check found, and its limit. `problem`: what else is wrong; empty if nothing is.
    `figures`: what was measured, by name, for the report's file."""

    difference: float
    limit: Limit
    problem: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        differences: Iterable[float],
        limit: Limit,
        problem: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> Outcome:
        """The outcome of several comparisons. A difference that is not a number is the largest of all."""
        found = list(map(float, differences))  # numpy's numbers are not written as JSON
        largest = math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
        return cls(largest, limit, problem if found else "nothing was compared", figures or {})

    @property
    def passed(self) -> bool:
        return not self.problem and self.difference <= self.limit.value


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the self-test.

    Attributes:
        compared: what is compared with what.
        advice: what to do if it fails.
        run: asks the engine and the plain model. It may raise what the engine raises.
        applies: whether the check means anything for a model.
    """

    name: str
    compared: str
    advice: str
    run: Callable[[TestedModel], Awaitable[Outcome]]
    applies: Callable[[TestedModel], bool] = lambda tested: True


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check of one model, with its outcome, or the error that it ended with."""

    check: Check
    outcome: Outcome | None
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome is not None and self.outcome.passed

    @property
    def problem(self) -> str:
        """Why it failed, in a sentence; empty if it passed."""
        if self.outcome is None:
            return f"it ended with an error: {self.error}"
        if self.passed or self.outcome.problem:
            return self.outcome.problem
        return f"the largest difference, {self.outcome.difference:.2g}, is above the limit"

    def as_json(self) -> dict[str, Any]:
        """For the report's file. A difference that is infinite or not a number is null."""
        outcome = self.outcome
        return {
            "name": self.check.name,
            "compared": self.check.compared,
            "passed": self.passed,
            "difference": outcome.difference if outcome is not None and math.isfinite(outcome.difference) else None,
            "limit": outcome.limit.value if outcome is not None else None,
            "limit_from": outcome.limit.source if outcome is not None else None,
            **({"figures": dict(outcome.figures)} if outcome is not None and outcome.figures else {}),
            "problem": self.problem or None,
            "advice": None if self.passed else self.check.advice,
        }
