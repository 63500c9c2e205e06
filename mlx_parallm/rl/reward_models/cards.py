"""Reward models that a running server trains and scores with."""

from __future__ import annotations

from dataclasses import dataclass


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
    """A reward model that was trained and written.

    Attributes:
        preferences: those that it was trained on.
        loss, agreement: means over the steps of the last epoch, before each step. The loss is in nats, and `agreement`
            the share of preferences whose chosen answer had the higher reward.
        held_out: preferences that it was not trained on. held_out_agreement, low, high: the share of them that it
            agrees with, and the 95 % interval; None if none was held out.
    """

    name: str
    preferences: int
    steps: int
    loss: float
    agreement: float
    held_out: int
    held_out_agreement: float | None
    low: float | None
    high: float | None
