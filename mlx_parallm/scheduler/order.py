"""The order in which prompts are served: those that wait for a row, and those that are in prefill."""

from __future__ import annotations

from mlx_parallm.core import Sequence, WorkClass
from mlx_parallm.scheduler.cost import Chunk, CostModel
from mlx_parallm.scheduler.fairness import TokenShares
from mlx_parallm.scheduler.sequences import PromptKind, Urgency, prompt_kind
from mlx_parallm.scheduler.units import RowMemory

_WAIT_CREDIT = 10.0
"""Seconds of remaining prefill that one second of waiting outweighs. A chunk served in turn restarts the wait, so a
long prompt beside a stream of short ones gets a chunk now and then, and not all the time."""


class PromptOrder:
    """Ranks prompts by what is left to compute of them, how long they have waited, and what their key has got."""

    def __init__(self, cost: CostModel, memory: RowMemory, shares: TokenShares) -> None:
        self._cost = cost
        self._memory = memory
        self._shares = shares

    def rank(self, sequence: Sequence) -> tuple[PromptKind, Urgency]:
        """The place of a waiting sequence in the queue. It depends on what is left to compute, not on the length."""
        cached = self._memory.cached(sequence)
        return prompt_kind(sequence, cached), self.urgency(sequence, cached)

    def in_prefill(self, prompt: Sequence) -> tuple[bool, int, int, Urgency]:
        """The place of a prompt among those in prefill: rollouts come last. Then it is its priority that counts, then
        what its key has got, then its urgency."""
        got = self._shares.tokens((prompt.work_class, prompt.key))
        rollout = prompt.work_class is WorkClass.TRAINING
        return rollout, prompt.priority, got, self.urgency(prompt, prompt.computed)

    def urgency(self, sequence: Sequence, computed: int) -> Urgency:
        """Orders prompts: by priority, then by seconds of prefill left, minus a credit for the time waited.

        Instead of subtracting the time waited, which changes all the time, it adds the time since which the sequence
        waits. The order is the same, because all sequences age at the same rate.
        """
        left = self._cost.chunk_seconds(Chunk(sequence.length - computed, computed))
        return (sequence.priority, left + _WAIT_CREDIT * sequence.served_at)
