"""Chunks of prompts packed into one unit of prefill, while seconds and tokens allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_parallm.scheduler.cost import Chunk, CostModel
from mlx_parallm.scheduler.sequence import Sequence
from mlx_parallm.scheduler.units import PrefillPart

_LEAST_CHUNK = 16
"""Prefill tokens in one unit, at least: below that the fixed cost of a unit dominates."""

_SCORED_CHUNK = 256
"""Tokens of a scored prompt in one unit, at most: their logits are [tokens, vocabulary] in fp32."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`most_tokens`: of one unit."""

    cost: CostModel
    most_tokens: int

    def pack(self, prompts: Iterable[Sequence], allowance: float) -> list[PrefillPart]:
        """The first chunks of `prompts`, in their order, in about `allowance` seconds; the first one always gets the
        least chunk. A scored prompt is alone in its unit."""
        parts: list[PrefillPart] = []
        for prompt in prompts:
            tokens = self._chunk_tokens(prompt, parts, allowance)
            if tokens == 0:
                break
            parts.append(PrefillPart(prompt, tokens))
            if prompt.scored:
                break
        return parts

    def seconds(self, parts: Iterable[PrefillPart]) -> float:
        """That a unit of them is expected to take."""
        return self.cost.seconds([part.chunk for part in parts])

    def _chunk_tokens(self, prompt: Sequence, beside: list[PrefillPart], allowance: float) -> int:
        """How many tokens of `prompt` fit beside the others."""
        if beside and prompt.scored:
            return 0
        room = self.most_tokens - sum(part.tokens for part in beside)
        most = min(prompt.to_prefill, room, _SCORED_CHUNK if prompt.scored else room)
        least = min(_LEAST_CHUNK, prompt.to_prefill, self.most_tokens)
        if most < least:
            return 0
        chunks = [part.chunk for part in beside]
        if beside and self.cost.seconds([*chunks, Chunk(least, prompt.computed)]) > allowance:
            return 0
        return self.cost.tokens_within(allowance, chunks, prompt.computed, least, most)
