"""Reward models that a running server trains and scores with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_parallm.core.json_values import ANSWER


@dataclass(frozen=True, slots=True)
class RewardModelSpec:
    """Which reward model to train, and how.

    Attributes:
        name: it becomes the scorer `reward_model:<name>`.
        held_out: share of the prompts whose preferences it is tested on, 0 to below 1.
        epochs: passes over the preferences.
        batch_size: preferences of one step.
        learning_rate: the peak; it rises first, and falls to 0.
        seed: of its initial weights, of the order of the preferences, and of what is held out.
    """

    name: str
    held_out: float
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class RewardModelCard:
    """A reward model that was trained. Its folder is on the disk."""

    __pydantic_config__ = ANSWER

    name: str
    """Its name."""
    scoring_function: str
    """The scorer that it is."""
    preferences: int
    """Preferences that it was trained on."""
    steps: int
    """Optimizer steps."""
    loss: float
    """Mean loss of the last epoch, in nats; 0.69 is chance."""
    agreement: float
    """Share of the preferences that it agreed with before each step of the last epoch."""
    held_out: int
    """Preferences that it was tested on."""
    held_out_agreement: float | None
    """Share of them that it agrees with; 0.5 is chance. null if none was held out."""
    held_out_low: float | None
    """Lower end of the 95 % interval of that share."""
    held_out_high: float | None
    """Upper end of it."""
    status: Literal["success"] = "success"
