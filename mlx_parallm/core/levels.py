"""The levels of a curriculum, as statuses and figures show them."""

from __future__ import annotations

from dataclasses import dataclass

LEVEL_PREFIX = "curriculum/"
"""What the names of a level's figures begin with, such as `curriculum/easy/success`."""


@dataclass(frozen=True, slots=True)
class LevelCard:
    """A level of tasks now.

    Attributes:
        success: mean reward of its recent tasks, from 0 to 1.
        share: probability that the next task is of this level.
        drawn: tasks of it so far, those of earlier processes of the run included.
    """

    level: str
    success: float
    share: float
    drawn: int
