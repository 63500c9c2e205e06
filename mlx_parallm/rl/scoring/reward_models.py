"""Reward models as scorers: `reward_model:NAME`.

Rewards of reward models are computed on the device of the server's process, before the group is sent to a scoring
process, where they are one term like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_parallm.core import Trajectory
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.rl.scoring.sample import Scorer, ScorerError, ScorerInput

PREFIX = "reward_model:"


class RewardModelScorers(Protocol):
    """The reward models of a server. Names have no prefix."""

    def check(self, name: str) -> None:
        """Raises InvalidRequestError: there is none of this name, or it cannot be used. Blocks on the disk."""

    async def rewards(self, name: str, group: Sequence[Trajectory]) -> Sequence[float]:
        """The rewards of these answers, in order.

        Raises:
            InvalidRequestError: it cannot be loaded.
            EngineError: it could not be computed.
        """


class NoRewardModels:
    """Where answers are scored without the device."""

    def check(self, name: str) -> None:
        raise InvalidRequestError("reward models score in a server or a run that trains, and not here")

    async def rewards(self, name: str, group: Sequence[Trajectory]) -> Sequence[float]:
        self.check(name)
        return ()


def scorer(name: str) -> Scorer:
    """In a scoring process: the reward that was computed before. `name` has the prefix."""

    def score(completion: ScorerInput) -> float:
        if name not in completion.reward_models:
            raise ScorerError(f"{name} has not scored this answer")
        return completion.reward_models[name]

    return score
