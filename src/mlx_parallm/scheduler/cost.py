"""How long a unit of device work takes: a linear model, calibrated at start, whose scale follows the machine.

Prefill units and decode steps both correct the scale, so that it is right again soon after other processes have taken
or given back the cores. A prediction only sizes units; no prompt waits for one (see `progress`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_FOLLOW = 0.2
"""Weight of the newest observation in the running scale while observations come often."""

_MEMORY_S = 30.0
"""Seconds without an observation after which the next one counts for about two thirds."""

_LEAST_RATIO, _MOST_RATIO = 0.1, 10.0
"""Bounds of one observation against the calibrated model: one outlier must not spoil the scale."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of one sequence, after `context` tokens that are in its row already."""

    tokens: int
    context: int


@dataclass(slots=True)
class CostModel:
    """Seconds of one prefill unit: fixed + the sum over its chunks of per_token·T + per_pair·T·(C + T/2).

    The first term is reading the weights, the second the matrix products, the third attention.
    `scale` is the running ratio of observed seconds to those of the calibrated terms.

    A decode step does the work of a unit of one-token chunks, and it samples. `step_ratio` is the running ratio of its
    cost to that unit's at the same speed of the machine. It is learnt from pairs of a step and the prefill unit after
    it; None before the first pair, when steps correct nothing.
    """

    fixed: float
    per_token: float
    per_pair: float
    scale: float = 1.0
    step_ratio: float | None = None
    _last_step: float | None = None  # the newest step's ratio, since the last prefill unit
    _observed_at: float | None = None

    def seconds(self, chunks: Iterable[Chunk]) -> float:
        """Predicted seconds of a unit of these chunks."""
        return self.scale * self._calibrated(chunks)

    def tokens_within(self, seconds: float, beside: Sequence[Chunk], context: int, least: int, most: int) -> int:
        """The most tokens in [least, most] that a unit may take up `beside` others within `seconds`.

        `least` when none fits.
        """
        low, high = least, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds((*beside, Chunk(middle, context))) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def observe_prefill(self, chunks: Iterable[Chunk], seconds: float, now: float) -> None:
        """Corrects the scale by a prefill unit that took `seconds` and ended at `now`."""
        ratio = self._ratio(chunks, seconds)
        if self._last_step is not None:
            paired = self._last_step / ratio
            self.step_ratio = paired if self.step_ratio is None else _moved(self.step_ratio, paired, _FOLLOW)
            self._last_step = None
        self._follow(ratio, seconds, now)

    def observe_step(self, chunks: Iterable[Chunk], seconds: float, now: float) -> None:
        """Corrects the scale by a decode step, given as one-token chunks, that took `seconds` and ended at `now`."""
        self._last_step = self._ratio(chunks, seconds)
        if self.step_ratio is not None:
            self._follow(self._last_step / self.step_ratio, seconds, now)

    def _ratio(self, chunks: Iterable[Chunk], seconds: float) -> float:
        return min(max(seconds / self._calibrated(chunks), _LEAST_RATIO), _MOST_RATIO)

    def _follow(self, ratio: float, seconds: float, now: float) -> None:
        """Load, heat and clock change all terms alike. The longer ago the last observation, the less it counts."""
        idle = 0.0 if self._observed_at is None else now - seconds - self._observed_at
        weight = max(_FOLLOW, 1.0 - math.exp(-idle / _MEMORY_S))
        self.scale = _moved(self.scale, ratio, weight)
        self._observed_at = now

    def _calibrated(self, chunks: Iterable[Chunk]) -> float:
        return self.fixed + sum(map(self._variable, chunks))

    def _variable(self, chunk: Chunk) -> float:
        return self.per_token * chunk.tokens + self.per_pair * chunk.tokens * (chunk.context + chunk.tokens / 2)


def _moved(running: float, newest: float, weight: float) -> float:
    """A running average after one more observation."""
    return running + weight * (newest - running)
