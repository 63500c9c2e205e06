"""Pace: how much an update takes, and how far it steps."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.core import Signal

OF_LESSONS = (Signal.REWARDS, Signal.CORRECTIONS)
"""What the updates of a lesson learn from: rewards, and examples that are imitated."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of one adapter, which a lesson changes as long as it lasts.

    Attributes:
        trajectories: those with a signal that make an update of rewards.
        learning_rate: of updates of OF_LESSONS, without a schedule; None: as configured.
    """

    trajectories: int
    learning_rate: float | None = None
