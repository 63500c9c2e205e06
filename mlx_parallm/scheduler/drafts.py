"""Chooses how many guessed tokens a forward unit checks: as many as make tokens come faster.

A row whose draft has k tokens, each right with probability a, advances by 1 + a + a² + … + a^k tokens on average. Each
token of a draft makes the unit longer for all its rows, by what the cost model predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from mlx_parallm.core import Sequence
from mlx_parallm.scheduler.cost import Chunk, CostModel

MOST_TOKENS = 32
"""Tokens of all decode rows and their drafts together. An Apple GPU multiplies 32 of them by a matrix in about the time
of one, and 33 in twice that time (ml-explore/mlx#3863)."""

_LEAST_GAIN = 1.03
"""Least predicted gain of a unit with drafts over the same unit without: less than that is within the error of the
prediction."""

_GAIN_WORTH_WAITING = 1.25
"""Least predicted gain for which the device idles until the tokens of the unit in flight are read."""


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The best drafts of a unit: tokens of each row that has one, and how much faster tokens come."""

    tokens: Counter[Sequence] = field(default_factory=Counter)
    gain: float = 1.0


def choose_drafts(rows: Seq[Sequence], cost: CostModel) -> None:
    """Sets `drafted` of these decode rows. A draft begins after a token that has been read."""
    drafts = _best_drafts(rows, [row for row in rows if not row.unread], cost)
    for row in rows:
        row.drafted = drafts.tokens[row] if drafts.gain >= _LEAST_GAIN else 0


def is_worth_waiting(rows: Seq[Sequence], cost: CostModel) -> bool:
    """Whether the tokens of these decode rows should be read before their next unit is chosen, so that all of them can
    have drafts."""
    return _best_drafts(rows, rows, cost).gain >= _GAIN_WORTH_WAITING


def _best_drafts(rows: Seq[Sequence], guessing: Iterable[Sequence], cost: CostModel) -> _Drafts:
    """The drafts of those of the rows that are `guessing`.

    The tokens of all guesses are tried in the order of their probability, and taken as long as tokens per second rise.
    """
    guesses = [(row.acceptance**place, row) for row in guessing for place in range(1, _most(row) + 1)]
    guesses.sort(key=lambda guess: -guess[0])
    drafts, tokens = Counter[Sequence](), float(len(rows))
    seconds = plain = cost.seconds([Chunk(1, row.computed) for row in rows], len(rows))
    for probability, row in guesses[: max(MOST_TOKENS - len(rows), 0)]:
        longer = cost.chunk_seconds(Chunk(1, row.length + drafts[row])) + cost.seconds(draws=1) - cost.seconds()
        if (tokens + probability) * seconds <= tokens * (seconds + longer):
            break
        tokens, seconds = tokens + probability, seconds + longer
        drafts[row] += 1
    return _Drafts(drafts, tokens * plain / (len(rows) * seconds)) if drafts else _Drafts()


def _most(row: Sequence) -> int:
    """The longest draft of a row: no token is drawn after `max_tokens`."""
    return min(len(row.guess), row.max_tokens - row.drawn - 1)
