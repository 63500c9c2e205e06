"""Averages of adapters on a running server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_parallm.core.adapters import AdapterText
from mlx_parallm.core.json_values import ANSWER
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
    """An average that was made."""

    __pydantic_config__ = ANSWER

    status: Literal["published", "held"]
    """`held`: it does not go live, and nothing of it is kept."""
    reason: str
    """Why it was held; empty if it is live."""
    adapter: AdapterText | None
    """The version that is live now; null if it was held."""
    adapters: Sequence[AdapterText]
    """The versions that were averaged."""
    rank: int
    """Rank of the average."""
    full_rank: int
    """The rank at which it would be exact."""
    error: float
    """The part of the mean's Frobenius norm that the rank loses, 0 to 1."""
    worst: str
    """The linear that loses the largest part."""
    worst_error: float
    """The part that it loses, 0 to 1."""
    evaluation: EvaluationResult | None
    """Its mean reward on the held-out tasks; null if the server does not evaluate versions, or if that failed."""
    checkpoint: str | None
    """Its checkpoint; null if it was held."""
