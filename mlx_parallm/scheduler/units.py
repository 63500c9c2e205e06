"""Units of device work, and what the scheduler is given: memory for rows, and other work that waits for the device."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mlx_parallm.core import AdapterRef, Sequence, SequenceStatus, to_preempt
from mlx_parallm.scheduler.cost import Chunk

# ---- units -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """The next `tokens` tokens of one sequence, after the `start` tokens that are computed.

    `in_turn`: a prompt was served in the order of the queue, so it moves back in the queue. False when it got only the
    small share of an overdue prompt.
    """

    sequence: Sequence
    start: int
    tokens: int
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

    spans: tuple[Span, ...]
    draws: tuple[Sequence, ...]
    decodes: int
    delayed: bool = False
    drafts: int = 0

    @property
    def rows(self) -> tuple[Span, ...]:
        """The decode rows: one token of each, and its draft."""
        return self.spans[: self.decodes]

    @property
    def tokens_drawn(self) -> int:
        """The number of tokens that the unit draws: one after each token of a draft too."""
        return sum(sequence.pooling is None for sequence in self.draws) + self.drafts

    @property
    def chunks(self) -> tuple[Span, ...]:
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


def forward_unit(rows: list[Sequence], chunks: list[Span], delayed: bool) -> ForwardUnit:
    """The unit of these decode rows and chunks. Call it before any of their counts change."""
    decodes = [Span(row, row.computed, 1 + row.drafted) for row in rows]
    last_chunks = (chunk.sequence for chunk in chunks if chunk.tokens == chunk.sequence.pending)
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


# ---- memory ------------------------------------------------------------------------------------


class RowMemory(Protocol):
    """The KV pool and the adapter bank, as the scheduler sees them: rows within a byte budget.

    A new row starts with keys and values that were computed before, if there are any: those of the prompt, from the row
    of a running member of its group, or those of the longest prefix in the prefix cache. At least one token of a row is
    always left to compute, because the next token is drawn from its logits.
    """

    def ready(self, adapter: AdapterRef) -> bool:
        """Whether rows of this adapter may be admitted now. If the adapter is not in the bank, staging is requested."""

    def cached(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence would be computed already if its row was opened now.

        It ranks the sequence in the queue, and need not be exact.
        """

    def open(self, sequence: Sequence) -> bool:
        """Gives `sequence` a row with room for all its tokens, and sets `computed` to how many of them it starts with.

        Returns False when the budget is spent.
        """

    def share(self, sequence: Sequence) -> Hashable:
        """Gives a prompt in prefill what other rows have computed of it since, and raises `computed` by that.

        Returns:
            A key that prompts have in common if they compute the same block next; None if no other prompt can have it.
        """

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        """Makes room for `tokens` tokens in the row, counted from its start. Returns False when the budget is spent."""

    def to_preempt(self, rows: list[Sequence], growing: Sequence) -> Sequence:
        """The row that gives way when `extend` found no room for all tokens of `growing`.

        `rows`: all live rows in order of admission.
        """

    def close(self, sequence: Sequence) -> None:
        """Takes the row away, and sets `computed` to 0."""


class UnlimitedMemory:
    """A RowMemory in which every adapter is ready and every row fits, to use a scheduler without an engine."""

    def ready(self, adapter: AdapterRef) -> bool:
        return True

    def cached(self, sequence: Sequence) -> int:
        shared = any(member.status is SequenceStatus.RUNNING for member in sequence.group.members)
        return sequence.prompt_length - 1 if shared else 0

    def open(self, sequence: Sequence) -> bool:
        sequence.computed = self.cached(sequence)
        return True

    def share(self, sequence: Sequence) -> Hashable:
        return None

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        return True

    def to_preempt(self, rows: list[Sequence], growing: Sequence) -> Sequence:
        return to_preempt(rows)

    def close(self, sequence: Sequence) -> None:
        sequence.computed = 0
