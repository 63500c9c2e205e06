"""Comparison: two versions of an adapter that answer the same requests, and what their rewards show so far."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakSet

from mlx_parallm.config import CompetitionConfig
from mlx_parallm.core import AdapterRef, ComparisonCard
from mlx_parallm.core.competition import ComparisonVerdict
from mlx_parallm.rl.competition.evidence import Contrast, DifferenceTest, Verdict
from mlx_parallm.rl.trajectories import TrajectoryGroup


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
class Outcome:
    """How a comparison ends. `verdict` and `reason`: as in `core.ComparisonCard`. `candidate_wins`: it goes live."""

    verdict: ComparisonVerdict
    reason: str

    @property
    def candidate_wins(self) -> bool:
        return self.verdict == "promoted"


_OUTCOMES = {
    Verdict.BETTER: Outcome("promoted", "its rewards are better"),
    Verdict.WORSE: Outcome("withdrawn", "its rewards are worse"),
    Verdict.EQUIVALENT: Outcome("no_difference", "differences of smallest_effect are ruled out"),
}
NOT_FINITE = Outcome("withdrawn", "it has drawn tokens with log-probabilities that are not finite")
OUT_OF_TIME = Outcome("no_difference", "max_hours have passed")
OUT_OF_REWARDS = Outcome("no_difference", "max_rewards of the candidate have come")


@dataclass(slots=True)
class Comparison:
    """One comparison that runs. It decides who gets the candidate, and counts one reward for each group: the mean over
    the answers of one request or, if requests name a group, of that group.

    `settings`: with the numbers of this comparison. `automatic`: see `core.ComparisonCard`.
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

    def observe(self, group: TrajectoryGroup) -> Outcome | None:
        """Takes the rewards of a group that has become complete, once. Returns how the comparison ends, if it does."""
        version = next(iter(group.versions)) if len(group.versions) == 1 else None
        since_start = all(turn.created >= self.started for member in group.members for turn in member.turns)
        if not (self.includes(version) and group.complete and since_start) or group in self._counted:
            return None
        self._counted.add(group)
        rewards = [member.reward for member in group.scored if member.reward is not None]
        return self.add(math.fsum(rewards) / len(rewards), version == self.candidate)

    def add(self, reward: float, of_candidate: bool) -> Outcome | None:
        """Takes the reward of one group. Returns how the comparison ends, if it does."""
        within = min(max(reward, self.settings.lowest_reward), self.settings.highest_reward)
        self.clipped += within != reward
        (self._of_candidate if of_candidate else self._of_live).add(within)
        if verdict := self._test.observe(self._contrast.add(within, of_candidate)):
            return _OUTCOMES[verdict]
        return OUT_OF_REWARDS if self._of_candidate.count >= self.settings.max_rewards else None

    def card(self, outcome: Outcome | None = None) -> ComparisonCard:
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
