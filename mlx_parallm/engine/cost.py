"""Predicts the seconds of a forward unit, and learns from the seconds that units took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_NEWEST_RATIO = 0.2
"""Weight of the newest observation in the running scale while observations come often."""

_MEMORY_S = 30.0
"""After this many seconds without an observation, the next one gets a weight of about two thirds."""

_MIN_RATIO, _MAX_RATIO = 0.1, 10.0
"""Bounds of one observation against the measured terms, so that one outlier cannot spoil the scale."""

_NEWEST_GROWTH = 0.4
"""Weight of the newest observation in the running scale of what drafts cost."""

_GROWTH_MEMORY_S = 60.0
"""Seconds of units without drafts in which two thirds of that scale are forgotten, so that drafts are tried again."""


class Chunk(NamedTuple):
    """`tokens` new tokens of one sequence, which attend to `context` tokens that are already in its row."""

    tokens: int
    context: int


@dataclass(slots=True)
class CostModel:
    """Predicts the seconds of a forward unit.

    The formula is fixed + per_draw·D + the sum over its chunks of per_token·T + per_pair·T·(C + T/2). T is a chunk's
    tokens, C its context, and D the number of tokens that the unit draws. A decode row is a chunk of one token. The
    first term stands for reading the weights, the second for the output layer and sampling, the third for the matrix
    products, the fourth for attention. The engine measures the terms at start; the defaults are a rough guess.

    `scale` is the running ratio of observed seconds to those that the measured terms give. Every unit corrects it, so
    it follows the load of the machine within seconds.

    `steps`: pairs of a number of tokens and the seconds of a unit that draws a token after each of so many, ascending.
    They are measured too, because the time of a few tokens need not grow evenly: some devices multiply two rows by a
    matrix in the time of one, and eight in three times as long. Without them, `growth` follows the formula.
    """

    fixed: float = 0.01
    per_token: float = 1e-4
    per_pair: float = 1e-8
    per_draw: float = 0.0
    scale: float = 1.0
    steps: tuple[tuple[int, float], ...] = ()
    growth_scale: float = 1.0
    _observed_at: float | None = None

    def seconds(self, chunks: Iterable[Chunk] = (), draws: int = 0) -> float:
        """Predicted seconds of a unit of these chunks."""
        return self.scale * (self.fixed + self.per_draw * draws) + sum(map(self.chunk_seconds, chunks))

    def chunk_seconds(self, chunk: Chunk) -> float:
        """Predicted seconds by which this chunk makes a unit longer."""
        tokens, context = chunk
        return self.scale * tokens * (self.per_token + self.per_pair * (context + tokens / 2))

    def growth(self, before: int, after: int) -> float:
        """How many times as long a unit of `after` tokens takes as one of `before` decode rows, if the tokens that are
        more are drafts of the same rows."""
        return self.growth_scale * self._step(after) / self._step(before) if after > before else 1.0

    def step_seconds(self, tokens: int) -> float:
        """Predicted seconds of a unit that draws a token after each of so many; 0 for none."""
        return self.scale * self._step(tokens) if tokens else 0.0

    def _step(self, tokens: int) -> float:
        """The seconds of a unit of so many tokens: on a straight line between the two measured numbers next to it."""
        for (fewer, short), (more, long) in pairwise(self.steps):
            if tokens <= more:
                return short + (long - short) * (tokens - fewer) / (more - fewer)
        return self.fixed + tokens * (self.per_token + self.per_draw)

    def tokens_within(self, seconds: float, context: int, least: int, most: int) -> int:
        """The largest chunk, in tokens, that makes a unit at most `seconds` longer.

        Args:
            context: tokens that the chunk attends to.
            least, most: bounds of the result; `least` is returned when nothing fits.
        """
        low, high = least, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.chunk_seconds(Chunk(middle, context)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, chunks: Iterable[Chunk], draws: int, seconds: float, now: float) -> None:
        """Corrects the scale by a unit that took `seconds` and ended at `now`.

        There is one scale for all terms, because load, heat and clock rate change them alike. The older the last
        observation, the less the old scale counts.
        """
        calibrated = self.seconds(chunks, draws) / self.scale
        ratio = min(max(seconds / calibrated, _MIN_RATIO), _MAX_RATIO)
        idle = 0.0 if self._observed_at is None else now - seconds - self._observed_at
        weight = max(_NEWEST_RATIO, 1.0 - math.exp(-idle / _MEMORY_S))
        self.scale += weight * (ratio - self.scale)
        self.growth_scale += min(seconds / _GROWTH_MEMORY_S, 1.0) * (1.0 - self.growth_scale)
        self._observed_at = now

    def forget(self) -> None:
        """Lets the next unit set the scale alone, whatever was observed before. Call it when the machine has slept: its
        clock rate may be another one."""
        self._observed_at, self.growth_scale = -math.inf, 1.0

    def observe_drafts(self, rows: Sequence[Chunk], drafts: int, seconds: float) -> None:
        """Corrects `growth` by a unit of decode rows, and of so many tokens of drafts, that took `seconds`.

        Args:
            rows: as they would be without drafts, so each is a chunk of one token.
        """
        expected = self.seconds(rows, len(rows)) * self.growth(len(rows), len(rows) + drafts) / self.growth_scale
        ratio = min(max(seconds / expected, _MIN_RATIO), _MAX_RATIO)
        self.growth_scale += _NEWEST_GROWTH * (ratio - self.growth_scale)
