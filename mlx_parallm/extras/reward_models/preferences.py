"""Preferences: of two answers to one prompt, the one that somebody prefers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.96
"""Of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Token ids of a prompt and of two whole answers, which end with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def chosen(self) -> tuple[int, ...]:
        """The row that the reward of the chosen answer is read from."""
        return self.prompt_ids + self.chosen_ids

    @property
    def rejected(self) -> tuple[int, ...]:
        """The row of the rejected answer."""
        return self.prompt_ids + self.rejected_ids


def split(preferences: Sequence[Preference], share: float, seed: int) -> tuple[list[Preference], list[Preference]]:
    """Those to train on, and those to hold out: about `share` of the prompts with all their preferences, so that no
    prompt is in both.

    Raises:
        ValueError: there are too few prompts to have any of both.
    """
    prompts = sorted({each.prompt_ids for each in preferences})
    held_out = set(random.Random(seed).sample(prompts, round(share * len(prompts))))
    if share > 0 and not 0 < len(held_out) < len(prompts):
        raise ValueError(
            f"{len(prompts)} different prompts are too few to hold out {share:g} of them; give another share, or 0 to "
            "hold out none"
        )
    return (
        [each for each in preferences if each.prompt_ids not in held_out],
        [each for each in preferences if each.prompt_ids in held_out],
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often a reward model gives the chosen answer the higher reward. Equal rewards count as half."""

    share: float
    preferences: int

    @classmethod
    def of(cls, chosen: Sequence[float], rejected: Sequence[float]) -> Agreement:
        """Of the rewards of both answers, in order; there is at least one pair."""
        points = sum((a > b) + 0.5 * (a == b) for a, b in zip(chosen, rejected, strict=True))
        return cls(points / len(chosen), len(chosen))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share over preferences like these (Wilson 1927)."""
        count, spread = self.preferences, _Z**2 / self.preferences
        middle = (self.share + spread / 2) / (1 + spread)
        half = _Z / (1 + spread) * math.sqrt(self.share * (1 - self.share) / count + spread / (4 * count))
        return max(0.0, middle - half), min(1.0, middle + half)
