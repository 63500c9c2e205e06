"""Comparisons of two versions of an adapter, as the event loop sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_parallm.core.adapters import AdapterText
from mlx_parallm.core.json_values import ANSWER, UnixTime

ComparisonVerdict = Literal["running", "promoted", "withdrawn", "no_difference", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class ComparisonSpec:
    """What a client asks to be compared. None: as configured.

    Attributes:
        candidate: `name@version`, or the name or tag of a checkpoint of the adapter.
        share: of the requests, for the candidate; above 0, at most 0.5.
        smallest_effect: the smallest difference of the mean rewards that matters.
        max_rewards, max_hours: when the comparison ends without a winner.
    """

    candidate: str
    share: float | None = None
    smallest_effect: float | None = None
    max_rewards: int | None = None
    max_hours: float | None = None


@dataclass(frozen=True, slots=True)
class ComparisonCard:
    """A comparison that runs, or the last one of its adapter."""

    __pydantic_config__ = ANSWER

    adapter: str
    """The adapter."""
    live: AdapterText
    """The version that stays live unless the candidate is promoted."""
    candidate: AdapterText
    """The version that is compared with it."""
    automatic: bool
    """Whether an update made the candidate; otherwise a request named it."""
    share: float
    """Share of the requests that get the candidate."""
    started: UnixTime
    """Time in ISO-8601, UTC."""
    verdict: ComparisonVerdict = "running"
    """`running`; `promoted`: the candidate is live now; `withdrawn`: its rewards were worse, or its numbers were not
    finite; `no_difference`; `stopped`; `failed`: the version that had won could not go live."""
    reason: str = ""
    """Why it ended; empty while it runs."""
    live_requests: int = 0
    """Requests that the live version got in the comparison, rewarded or not."""
    candidate_requests: int = 0
    """Requests that the candidate got."""
    live_rewards: int = 0
    """Rewarded requests of the live version."""
    candidate_rewards: int = 0
    """Rewarded requests of the candidate."""
    live_mean: float | None = None
    """Mean reward of the live version; null before the first."""
    candidate_mean: float | None = None
    """Mean reward of the candidate; null before the first."""
    p_better: float = 1.0
    """The smallest error rate at which the candidate would have been called better by now, 0 to 1. It is valid at any
    time, however often it is read."""
    p_worse: float = 1.0
    """The same for worse."""
    clipped: int = 0
    """Rewards outside of the configured range, which count as its ends."""
    ended: UnixTime | None = None
    """Time in ISO-8601, UTC; null while it runs."""
