"""Comparison: two versions of an adapter that answer the same requests, and what their rewards show so far."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakSet

from mlx_parallm.config import CompetitionConfig
from mlx_parallm.core.adapters import AdapterRef, AdapterText
from mlx_parallm.core.json_values import ANSWER, UnixTime
from mlx_parallm.extras.competition.evidence import Contrast, DifferenceTest, Verdict
from mlx_parallm.rl.trajectories import TrajectoryGroup

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


@dataclass(slots=True)
class MeanReward:
    """Rewards of one version."""

    count: int = 0
    total: float = 0.0

    def add(self, reward: float) -> None:
        self.count += 1
        self.total += reward

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class ComparisonEnd:
    """How a comparison ends. `verdict` and `reason`: as in `ComparisonCard`. `candidate_wins`: it goes live."""

    verdict: ComparisonVerdict
    reason: str

    @property
    def candidate_wins(self) -> bool:
        return self.verdict == "promoted"


_OUTCOMES = {
    Verdict.BETTER: ComparisonEnd("promoted", "its rewards are better"),
    Verdict.WORSE: ComparisonEnd("withdrawn", "its rewards are worse"),
    Verdict.EQUIVALENT: ComparisonEnd("no_difference", "differences of smallest_effect are ruled out"),
}
NOT_FINITE = ComparisonEnd("withdrawn", "it has sampled tokens with log-probabilities that are not finite")
OUT_OF_TIME = ComparisonEnd("no_difference", "max_hours have passed")
OUT_OF_REWARDS = ComparisonEnd("no_difference", "max_rewards of the candidate have come")


@dataclass(slots=True)
class LiveComparison:
    """One comparison that runs. It decides who gets the candidate, and counts one reward for each group: the mean over
    the answers of one request or, if requests name a group, of that group.

    `settings`: with the numbers of this comparison. `automatic`: see `ComparisonCard`.
    """

    live: AdapterRef
    candidate: AdapterRef
    settings: CompetitionConfig
    automatic: bool = False
    started: float = field(default_factory=time.time)
    clipped: int = 0
    _drawn: Counter[AdapterRef] = field(default_factory=Counter)
    _of_live: MeanReward = field(default_factory=MeanReward)
    _of_candidate: MeanReward = field(default_factory=MeanReward)
    _salt: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    _counted: WeakSet[TrajectoryGroup] = field(default_factory=WeakSet)
    _test: DifferenceTest = field(init=False)
    _contrast: Contrast = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self._contrast = Contrast(settings.share, settings.lowest_reward, settings.highest_reward)
        self._test = DifferenceTest(settings.error_rate, settings.smallest_effect * self._contrast.scale)

    def choose(self, key: str) -> AdapterRef:
        """The version for a request with this key. The same one each time; another comparison draws anew."""
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=self._salt).digest()
        chosen = self.candidate if int.from_bytes(digest, "big") < self.settings.share * 2**64 else self.live
        self._drawn[chosen] += 1
        return chosen

    def includes(self, version: AdapterRef | None) -> bool:
        return version in (self.live, self.candidate)

    # -- rewards ---------------------------------------------------------------------------------

    def observe(self, group: TrajectoryGroup) -> ComparisonEnd | None:
        """Takes the rewards of a group that has become complete, once. Returns how the comparison ends, if it does."""
        version = next(iter(group.versions)) if len(group.versions) == 1 else None
        since_start = all(turn.created >= self.started for member in group.members for turn in member.turns)
        if not (self.includes(version) and group.complete and since_start) or group in self._counted:
            return None
        self._counted.add(group)
        rewards = [member.reward for member in group.scored if member.reward is not None]
        return self.add(math.fsum(rewards) / len(rewards), version == self.candidate)

    def add(self, reward: float, of_candidate: bool) -> ComparisonEnd | None:
        """Takes the reward of one group. Returns how the comparison ends, if it does."""
        within = min(max(reward, self.settings.lowest_reward), self.settings.highest_reward)
        self.clipped += within != reward
        (self._of_candidate if of_candidate else self._of_live).add(within)
        if verdict := self._test.observe(self._contrast.add(within, of_candidate)):
            return _OUTCOMES[verdict]
        return OUT_OF_REWARDS if self._of_candidate.count >= self.settings.max_rewards else None

    def card(self, outcome: ComparisonEnd | None = None) -> ComparisonCard:
        """What is known now. `outcome`: how it has ended; None: it runs."""
        return ComparisonCard(
            adapter=self.live.name,
            live=self.live,
            candidate=self.candidate,
            automatic=self.automatic,
            share=self.settings.share,
            started=self.started,
            verdict=outcome.verdict if outcome else "running",
            reason=outcome.reason if outcome else "",
            live_requests=self._drawn[self.live],
            candidate_requests=self._drawn[self.candidate],
            live_rewards=self._of_live.count,
            candidate_rewards=self._of_candidate.count,
            live_mean=self._of_live.mean,
            candidate_mean=self._of_candidate.mean,
            p_better=self._test.p_better,
            p_worse=self._test.p_worse,
            clipped=self.clipped,
            ended=time.time() if outcome else None,
        )
