"""How long a unit of device work takes: a linear model whose scale follows the machine."""

from __future__ import annotations

from dataclasses import dataclass

_FOLLOW = 0.2
"""Weight of the newest observation in the running scale."""


@dataclass(slots=True)
class CostModel:
    """Seconds of one prefill chunk of T tokens at context C: fixed + per_token·T + per_pair·T·(C + T/2).

    The first term is reading the weights, the second the matrix products, the third attention.
    `scale` is the running ratio of what was observed to what was predicted.
    """

    fixed: float
    per_token: float
    per_pair: float
    scale: float = 1.0

    def seconds(self, tokens: int, context: int) -> float:
        return self.scale * (self.fixed + self.per_token * tokens + self.per_pair * tokens * (context + tokens / 2))

    def tokens_within(self, seconds: float, context: int, least: int, most: int) -> int:
        """The largest chunk in [least, most] that fits in `seconds`; `least` when none does."""
        low, high = least, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle, context) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """Follows the machine: load, heat and clock change all terms alike."""
        predicted = self.seconds(tokens, context) / self.scale
        self.scale += _FOLLOW * (min(max(seconds / predicted, 0.1), 10.0) - self.scale)
