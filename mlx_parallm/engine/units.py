"""Units of device work, and the work beside requests that waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from mlx_parallm.batch.spans import Span
from mlx_parallm.engine.cost import Chunk
from mlx_parallm.engine.sequence import Sequence

# ---- units -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitSpan(Span[Sequence]):
    """A span of a forward unit.

    `in_turn`: a prompt was served in the order of the queue, so it moves back in the queue. False when it got only the
    small share of an overdue prompt.
    """

    in_turn: bool = True

    @property
    def work(self) -> Chunk:
        """The span as the cost model sees it."""
        return Chunk(self.tokens, self.start)


@dataclass(frozen=True, slots=True)
class ForwardUnit:
    """One forward pass over the next tokens of several sequences.

    Attributes:
        spans: decode rows, oldest first, then the chunks of prompts.
        draws: the sequences that draw a token at the end of the unit, or whose hidden states are all pooled by then, in
            the order of `spans`: all decode rows, and the prompts whose last chunk this is.
        decodes: the number of decode rows.
        drafts: guessed tokens of decode rows that the unit computes and checks, besides the token of each row.
        delayed: staging or training ran since the last forward unit.
    """

    spans: tuple[UnitSpan, ...]
    draws: tuple[Sequence, ...]
    decodes: int
    delayed: bool = False
    drafts: int = 0

    @property
    def rows(self) -> tuple[UnitSpan, ...]:
        """The decode rows: one token of each, and its draft."""
        return self.spans[: self.decodes]

    @property
    def tokens_drawn(self) -> int:
        """The number of tokens that the unit draws: one after each token of a draft too."""
        return sum(sequence.pooling is None for sequence in self.draws) + self.drafts

    @property
    def chunks(self) -> tuple[UnitSpan, ...]:
        """The chunks of prompts."""
        return self.spans[self.decodes :]


@dataclass(frozen=True, slots=True)
class StagingUnit:
    """Copies adapters into the bank for about `seconds`; at least one piece of that work runs."""

    seconds: float


@dataclass(frozen=True, slots=True)
class TrainingUnit:
    """Runs as much of a micro-step as fits into `seconds`."""

    seconds: float


Unit = ForwardUnit | StagingUnit | TrainingUnit


def forward_unit(rows: list[Sequence], chunks: list[UnitSpan], delayed: bool) -> ForwardUnit:
    """The unit of these decode rows and chunks. Call it before any of their counts change."""
    decodes = [UnitSpan(row, row.computed, 1 + row.drafted) for row in rows]
    last_chunks = (chunk.row for chunk in chunks if chunk.tokens == chunk.row.pending)
    return ForwardUnit((*decodes, *chunks), (*rows, *last_chunks), len(rows), delayed, sum(row.drafted for row in rows))


# ---- work beside requests ----------------------------------------------------------------------


class WorkKind(Enum):
    """What a candidate does: copy adapters into the bank, or train."""

    STAGING = "staging"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Work that waits for the device beside requests; at most one of each kind.

    Attributes:
        due: when the work should run, on the monotonic clock. Staging that is due may use the whole stall budget. When
            training is due follows from its share of time, so this field is not read for it.
        seconds: how long the work would run without interruption. Its unit is never longer.
    """

    kind: WorkKind
    due: float = math.inf
    seconds: float = math.inf
