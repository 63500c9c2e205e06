"""Averages of adapters on a running server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.training import EvaluationResult


@dataclass(frozen=True, slots=True)
class AverageSpec:
    """Which average to make. `weights` and `rank` as in `adapters.average.average`.

    `adapters`: selectors of the versions. `name`: the adapter that the average becomes a version of.
    """

    adapters: Sequence[str]
    name: str
    weights: Sequence[float] | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class AverageCard:
    """An average that was made.

    Attributes:
        adapters: the versions that it is of.
        live: the version that is live under its name now; None if it was held back.
        reason: why it was held back; "" if it is live.
        full_rank: the rank at which it would be exact.
        error: the part of the Frobenius norm that its rank loses, 0 to 1.
        worst, worst_error: the linear that loses the largest part, and that part.
        evaluation: None if versions are not evaluated, or if the evaluation failed.
        checkpoint: the name of its checkpoint; "" if it was held back.
    """

    adapters: Sequence[AdapterRef]
    live: AdapterRef | None
    reason: str
    rank: int
    full_rank: int
    error: float
    worst: str
    worst_error: float
    evaluation: EvaluationResult | None
    checkpoint: str
