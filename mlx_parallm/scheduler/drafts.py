"""Chooses how many guessed tokens a forward unit checks: as many as make tokens come faster.

A row whose draft has k tokens, each right with probability a, advances by 1 + a + a² + … + a^k tokens on average. Each
token of a draft makes the unit longer for all its rows, by `CostModel.growth`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from mlx_parallm.core import Sequence
from mlx_parallm.scheduler.cost import CostModel

MOST_TOKENS = 32
"""Tokens of all decode rows and their drafts together. An Apple GPU multiplies 32 of them by a matrix in about the time
of one, and 33 in twice that time (ml-explore/mlx#3863)."""

_LEAST_GAIN = 1.05
"""Least predicted gain of a unit with drafts over the same unit without. Less than that is within the error of the
prediction, which leaves out that rows with drafts need attention calls of their own."""

_GAIN_WORTH_WAITING = 1.25
"""Least predicted gain for which the device idles until the tokens of the unit in flight are read."""


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The best drafts of a unit: tokens of each row that has one, and how much faster tokens come."""

    tokens: Counter[Sequence]
    gain: float


def choose_drafts(rows: Seq[Sequence], cost: CostModel) -> None:
    """Sets `drafted` of these decode rows. A draft begins after a token that has been read."""
    if not rows:
        return
    drafts = _best_drafts(rows, [row for row in rows if not row.unread], cost)
    for row in rows:
        row.drafted = drafts.tokens[row] if drafts.gain >= _LEAST_GAIN else 0


def is_worth_waiting(rows: Seq[Sequence], cost: CostModel) -> bool:
    """Whether the tokens of these decode rows should be read before their next unit is chosen, so that all of them can
    have drafts."""
    return bool(rows) and _best_drafts(rows, rows, cost).gain >= _GAIN_WORTH_WAITING


def _best_drafts(rows: Seq[Sequence], guessing: Iterable[Sequence], cost: CostModel) -> _Drafts:
    """The drafts of those of the rows that are `guessing`: the most probable tokens of all guesses, as many as let
    tokens come fastest."""
    guesses = [(row.acceptance**place, row) for row in guessing for place in range(1, _most(row) + 1)]
    guesses.sort(key=lambda guess: -guess[0])
    expected = accumulate((probability for probability, _ in guesses[: max(MOST_TOKENS - len(rows), 0)]), initial=0.0)
    gains = [
        (1.0 + right / len(rows)) / cost.growth(len(rows), len(rows) + taken) for taken, right in enumerate(expected)
    ]
    best = max(range(len(gains)), key=gains.__getitem__)
    return _Drafts(Counter(row for _, row in guesses[:best]), gains[best])


def _most(row: Sequence) -> int:
    """The longest draft of a row: no token is drawn after `max_tokens`."""
    return min(len(row.guess), row.max_tokens - row.drawn - 1)
