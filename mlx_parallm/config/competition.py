"""The section `rl_training.competition`: comparisons of two versions of an adapter on live requests. The string below a
field is its description."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from mlx_parallm.config.types import Integer, Number, Section


class CompetitionConfig(Section):
    """Comparisons of a version of an adapter with the live one, by the rewards of live requests. A comparison that is
    started with POST /v1/training/compare may set its own share, smallest_effect, max_rewards and max_hours."""

    automatic: bool = False
    """Compare every version that training makes with the one before, and go back to that one unless the new version is
    better. Until the comparison ends, no further update is made.
    """
    share: Number = Field(default=0.2, gt=0, le=0.5)
    """Share of the requests that get the candidate, by user or session where requests name one."""
    smallest_effect: Number = Field(default=0.05, gt=0)
    """Smallest difference of the mean rewards that matters. A comparison ends without a winner when differences as
    large as this are ruled out.
    """
    error_rate: Number = Field(default=0.05, gt=0, le=0.5)
    """Largest probability that two versions of the same mean reward are called different, however long they are
    compared and however often somebody looks.
    """
    max_rewards: Integer = Field(default=2000, ge=1)
    """Rewarded requests of the candidate after which a comparison ends without a winner."""
    max_hours: Number = Field(default=24.0, gt=0)
    """Time in hours after which a comparison ends without a winner."""
    lowest_reward: Number = -1.0
    """Smallest reward that a request can get. A smaller one counts as this."""
    highest_reward: Number = 1.0
    """Largest reward that a request can get. A larger one counts as this."""

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        span = self.highest_reward - self.lowest_reward
        if span <= 0:
            raise ValueError("highest_reward must be above lowest_reward")
        if self.smallest_effect >= span:
            raise ValueError(f"smallest_effect must be below the range of the rewards, {span:g}")
        return self
