"""Chunks of prompts packed into one unit of prefill, while seconds and tokens allow."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from mlx_parallm.scheduler.cost import Chunk, CostModel
from mlx_parallm.scheduler.sequence import Sequence
from mlx_parallm.scheduler.units import PrefillPart

_LEAST_CHUNK = 16
"""Prefill tokens in one unit, at least: below that the fixed cost of a unit dominates."""

_LEAST_SHARE = 4
"""Tokens of each overdue prompt, at least, where several share one unit."""

_SCORED_CHUNK = 256
"""Tokens of a scored prompt in one unit, at most: their logits are [tokens, vocabulary] in fp32."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`most_tokens`: of one unit."""

    cost: CostModel
    most_tokens: int

    def pack(self, prompts: Rows[Sequence], overdue: Rows[Sequence], allowance: float) -> list[PrefillPart]:
        """The next chunks of `prompts`, in their order, in about `allowance` seconds.

        Overdue prompts get a small share first, whatever it takes; without any, the first prompt gets the least chunk.
        A scored prompt is alone in its unit. Empty only when `prompts` is.

        Args:
            prompts: in the order in which they are to be served.
            overdue: those of them that must be in the unit, as far as `most_tokens` allows, most overdue first.
        """
        if overdue and overdue[0].scored:
            return self._fill(overdue[:1], {}, allowance)
        return self._fill(prompts, self._shares(overdue), allowance)

    def seconds(self, parts: Iterable[PrefillPart]) -> float:
        """Predicted seconds of a unit of them."""
        return self.cost.seconds([part.chunk for part in parts])

    def _shares(self, overdue: Rows[Sequence]) -> dict[Sequence, int]:
        """Tokens that overdue prompts get in any case: a least chunk together, or a least share each."""
        share = max(_LEAST_SHARE, _LEAST_CHUNK // max(len(overdue), 1))
        shares: dict[Sequence, int] = {}
        for prompt in overdue:
            tokens = min(share, prompt.to_prefill, self.most_tokens - sum(shares.values()))
            if tokens > 0 and not prompt.scored:
                shares[prompt] = tokens
        return shares

    def _fill(self, prompts: Iterable[Sequence], shares: dict[Sequence, int], allowance: float) -> list[PrefillPart]:
        """The shares, made larger or joined by others in the order of `prompts` while the allowance lasts."""
        tokens = dict(shares)
        for prompt in prompts:
            beside = {other: count for other, count in tokens.items() if other is not prompt}
            taken = self._chunk_tokens(prompt, beside, shares.get(prompt, 0), allowance)
            if taken == 0:
                break
            tokens[prompt] = taken
            if prompt.scored:
                break
        return [PrefillPart(each, count, in_turn=count > shares.get(each, 0)) for each, count in tokens.items()]

    def _chunk_tokens(self, prompt: Sequence, beside: dict[Sequence, int], share: int, allowance: float) -> int:
        """How many tokens of `prompt` fit beside the others; `share` of them whatever they take, 0 when none fits."""
        if beside and prompt.scored:
            return 0
        room = self.most_tokens - sum(beside.values())
        most = min(prompt.to_prefill, room, _SCORED_CHUNK if prompt.scored else room)
        least = share or min(_LEAST_CHUNK, prompt.to_prefill, self.most_tokens)
        if most < least:
            return 0
        chunks = [Chunk(tokens, other.computed) for other, tokens in beside.items()]
        if beside and not share and self.cost.seconds([*chunks, Chunk(least, prompt.computed)]) > allowance:
            return 0
        return self.cost.tokens_within(allowance, chunks, prompt.computed, least, most)
