"""One decode step of the batch runner, for rows of any context lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from benchmarks.lib.rows import begin, open_row
from mlx_parallm.batch.runner import BatchRunner, Pending
from mlx_parallm.core.requests import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)
_TOKEN = 7


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a decode step: tokens that each has in the KV pool, and the adapter slot of each."""

    contexts: tuple[int, ...]
    slots: tuple[int, ...]
    sampling: SamplingParams

    @classmethod
    def of(cls, contexts: Sequence[int], sampled: bool = False, adapters: int = 0) -> "Rows":
        """`adapters`: how many different ones the rows use in turn; 0 for the base model."""
        slots = tuple(1 + row % adapters if adapters else 0 for row in range(len(contexts)))
        return cls(tuple(contexts), slots, SAMPLED if sampled else GREEDY)

    @property
    def text(self) -> str:
        count, shortest, longest = len(self.contexts), min(self.contexts), max(self.contexts)
        parts = [f"{count} {'row' if count == 1 else 'rows'} at {shortest:,}"]
        if longest > shortest:
            parts[0] += f" to {longest:,}"
        if self.sampling is SAMPLED:
            parts.append("top-p 0.9")
        if adapters := len(set(self.slots) - {0}):
            parts.append("one adapter" if adapters == 1 else f"{adapters} adapters")
        return ", ".join(parts)


class Decoder:
    """Live rows of a runner, each with its context. The content of the context is never computed.

    Args:
        room: steps that can be decoded.
    """

    def __init__(self, runner: BatchRunner, rows: Rows, room: int = 1) -> None:
        self._runner = runner
        self._pending: Pending | None = None
        places = zip(rows.contexts, rows.slots, strict=True)
        self._rows = [open_row(runner, length, room, slot, rows.sampling, _TOKEN) for length, slot in places]

    def step(self) -> list[mx.array]:
        """Builds the graph of one step and launches it. Returns what the host reads back."""
        self.logits()
        return self.draw()

    def logits(self) -> mx.array:
        """Builds the graph of one forward pass, with input tokens from the host. Returns the logits, [rows, vocab]."""
        for row in self._rows:
            row.tokens = [_TOKEN] * row.length
        self._pending = begin(self._runner, self._rows, None)
        assert self._pending.logits is not None
        return self._pending.logits

    def draw(self) -> list[mx.array]:
        """Builds the graph of sampling from the last `logits` and launches it. Returns what the host reads back."""
        assert self._pending is not None
        sampled = self._runner.sample(self._pending).sampled
        assert sampled is not None
        return sampled.arrays()

    def close(self) -> None:
        for row in self._rows:
            self._runner.cache.close(row)
