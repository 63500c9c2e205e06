"""Units of device work: what the scheduler picks, one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.scheduler.cost import Chunk
from mlx_parallm.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Compute the next `tokens` tokens of one sequence.

    `in_turn`: False when it only gets the small share of an overdue prompt, so that its place in the order stays.
    """

    sequence: Sequence
    tokens: int
    in_turn: bool = True

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.tokens, self.sequence.computed)


@dataclass(frozen=True, slots=True)
class PrefillUnit:
    """Chunks of several prompts, computed in one forward."""

    parts: tuple[PrefillPart, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class DecodeUnit:
    """Draw one token for each of these rows. `awaited`: they have waited for more than a decode step."""

    sequences: tuple[Sequence, ...]
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class StagingUnit:
    """Staging of adapters for about so many seconds, one unit of it at least."""

    seconds: float


@dataclass(frozen=True, slots=True)
class TrainingUnit:
    """One unit of an update: of a micro-step, as much as is done within so many seconds."""

    seconds: float


Unit = PrefillUnit | DecodeUnit | StagingUnit | TrainingUnit
