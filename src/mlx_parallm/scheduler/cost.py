"""How long a unit of device work takes: a linear model whose scale follows the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_FOLLOW = 0.2
"""Weight of the newest observation in the running scale."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of one sequence, after `context` tokens that are in its row already."""

    tokens: int
    context: int


@dataclass(slots=True)
class CostModel:
    """Seconds of one prefill unit: fixed + the sum over its chunks of per_token·T + per_pair·T·(C + T/2).

    The first term is reading the weights, the second the matrix products, the third attention.
    `scale` is the running ratio of what was observed to what was predicted.
    """

    fixed: float
    per_token: float
    per_pair: float
    scale: float = 1.0

    def seconds(self, chunks: Iterable[Chunk]) -> float:
        """Of a unit of these chunks."""
        return self.scale * (self.fixed + sum(map(self._variable, chunks)))

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

    def observe(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """Follows the machine: load, heat and clock change all terms alike."""
        predicted = self.seconds(chunks) / self.scale
        self.scale += _FOLLOW * (min(max(seconds / predicted, 0.1), 10.0) - self.scale)

    def _variable(self, chunk: Chunk) -> float:
        return self.per_token * chunk.tokens + self.per_pair * chunk.tokens * (chunk.context + chunk.tokens / 2)
