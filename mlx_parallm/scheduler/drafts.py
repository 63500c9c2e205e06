"""Chooses how many guessed tokens a forward unit checks: as many as make tokens come faster.

A row whose draft has k tokens, each right with probability a, advances by 1 + a + a² + … + a^k tokens on average. Each
token of a draft makes the unit longer for all its rows, by what the cost model predicts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from mlx_parallm.core import Sequence
from mlx_parallm.scheduler.cost import Chunk, CostModel

_GAIN = 1.03
"""Least predicted gain of a unit with drafts over the same unit without: less than that is within the error of the
prediction."""


def choose_drafts(rows: Seq[Sequence], cost: CostModel) -> None:
    """Sets `drafted` of these decode rows.

    The tokens of all guesses are tried in the order of their probability, and taken as long as tokens per second rise.
    """
    for row in rows:
        row.drafted = 0
    guesses = sorted(
        ((row.acceptance**place, row) for row in rows for place in range(1, _most(row) + 1)),
        key=lambda guess: -guess[0],
    )
    if not guesses:
        return
    seconds = plain = cost.seconds([Chunk(1, row.computed) for row in rows], len(rows))
    tokens = float(len(rows))
    for probability, row in guesses:
        longer = cost.chunk_seconds(Chunk(1, row.length + row.drafted)) + cost.seconds(draws=1) - cost.seconds()
        if (tokens + probability) * seconds <= tokens * (seconds + longer):
            break
        tokens, seconds = tokens + probability, seconds + longer
        row.drafted += 1
    if tokens * plain < _GAIN * len(rows) * seconds:
        for row in rows:
            row.drafted = 0


def _most(row: Sequence) -> int:
    """The longest draft of a row. It begins after a token that has been read, and no token is drawn after
    `max_tokens`."""
    return 0 if row.unread else min(len(row.guess), row.max_tokens - row.drawn - 1)
