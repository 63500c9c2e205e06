"""Comparisons of two versions of an adapter, as the event loop sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.readers import Reader


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
    """A comparison that runs, or the last one of its adapter.

    Attributes:
        live: the version that is live unless the candidate is promoted.
        automatic: the candidate came from an update, and not from a client.
        verdict: running, promoted, withdrawn, no_difference, stopped or failed. With the last three, `live` stays.
        reason: why it ended; empty while it runs.
        live_requests, candidate_requests: requests that each of them got.
        live_rewards, candidate_rewards: rewarded requests of each.
        p_better: the smallest error rate at which the candidate would have been called better by now. p_worse: worse.
        clipped: rewards outside of the configured range.
        ended: like `started`, Unix time in seconds.
    """

    adapter: str
    live: AdapterRef
    candidate: AdapterRef
    automatic: bool
    share: float
    started: float
    verdict: str = "running"
    reason: str = ""
    live_requests: int = 0
    candidate_requests: int = 0
    live_rewards: int = 0
    candidate_rewards: int = 0
    live_mean: float | None = None
    candidate_mean: float | None = None
    p_better: float = 1.0
    p_worse: float = 1.0
    clipped: int = 0
    ended: float | None = None


class CompetitionClient(Protocol):
    """The asyncio interface of comparisons, used on the event loop's thread only. `adapter` None is the default one."""

    async def start(self, adapter: str | None, spec: ComparisonSpec, reader: Reader) -> ComparisonCard:
        """Begins to compare a version with the live one. Returns when the first request can get it.

        Raises:
            UnknownModelError: the adapter is not trained here or not seen by the reader, or it has no such version.
            InvalidRequestError: the candidate is a version of another adapter, or a number is out of range.
            ConflictError: another comparison of the adapter runs; no version of it is live; the candidate is live
                already, or has no checkpoint from which training could go on.
            AdapterUnavailableError: the candidate's weights cannot be read.
        """
        ...

    async def stop(self, adapter: str | None, reader: Reader) -> ComparisonCard:
        """Ends a comparison without a winner.

        Raises:
            UnknownModelError: the adapter is not trained here, or the reader does not see it.
            ConflictError: none of the adapter runs.
        """
        ...

    def cards(self, reader: Reader) -> Sequence[ComparisonCard]:
        """Of each adapter that the reader sees, the comparison that runs, or else the last one since the process
        started."""
        ...

    def ended(self, adapter: str) -> dict[str, int]:
        """Comparisons of an adapter that have ended since the start of the process, by verdict."""
        ...
