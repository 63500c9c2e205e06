"""Units of device work, and what the scheduler is given: memory for rows, and other work that waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mlx_parallm.core import AdapterRef, SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` new tokens of one sequence, which attend to `context` tokens that are already in its row."""

    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Computes the next `tokens` tokens of one sequence.

    `in_turn`: the sequence was served in the order of the queue, so it moves back in the queue. False when it got
    only the small share of an overdue prompt.
    """

    sequence: SequenceState
    tokens: int
    in_turn: bool = True

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.tokens, self.sequence.computed)


@dataclass(frozen=True, slots=True)
class PrefillUnit:
    """Computes chunks of several prompts in one forward pass."""

    parts: tuple[PrefillPart, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class DecodeUnit:
    """Draws one token for each sequence. `delayed`: other work ran since the last decode step."""

    sequences: tuple[SequenceState, ...]
    delayed: bool = False


@dataclass(frozen=True, slots=True)
class StagingUnit:
    """Copies adapters into the bank for about `seconds`; at least one piece of that work runs."""

    seconds: float


@dataclass(frozen=True, slots=True)
class TrainingUnit:
    """Runs as much of a micro-step as fits into `seconds`."""

    seconds: float


Unit = PrefillUnit | DecodeUnit | StagingUnit | TrainingUnit


@dataclass(frozen=True, slots=True)
class OtherWork:
    """Work that waits for the device beside requests.

    `staging_is_urgent`: the adapters that wait should be in the bank as soon as possible.
    """

    staging: bool = False
    staging_is_urgent: bool = False
    training: bool = False


NO_OTHER_WORK = OtherWork()


class RowMemory(Protocol):
    """The KV pool and the adapter bank, as the scheduler sees them: rows within a byte budget."""

    def ready(self, adapter: AdapterRef) -> bool:
        """Whether rows of this adapter may be admitted now. If the adapter is not in the bank, staging is requested."""
        ...

    def allocate(self, sequence: SequenceState, source: SequenceState | None) -> int | None:
        """Gives `sequence` a row for all its tokens. With `source`, the row starts as a copy of that row's prompt.

        Returns:
            The number of tokens that are already computed in the new row, or None when the budget is spent.
        """
        ...

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        """Makes room for `tokens` tokens in the row. Returns False when the budget is spent."""
        ...

    def free(self, sequence: SequenceState) -> None: ...


class UnlimitedMemory:
    """A RowMemory in which every adapter is ready and every row fits, to use a scheduler without an engine."""

    def ready(self, adapter: AdapterRef) -> bool:
        return True

    def allocate(self, sequence: SequenceState, source: SequenceState | None) -> int | None:
        return sequence.prompt_length - 1 if source else 0

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        return True

    def free(self, sequence: SequenceState) -> None:
        pass
