"""Chooses how many guessed tokens a forward unit checks: as many as make tokens come faster.

A row whose draft has k tokens, each right with probability a, advances by 1 + a + a² + … + a^k tokens on average. Each
token of a draft makes the unit longer for all its rows, by `CostModel.growth`. Some guesses cost nothing; those of a
draft model take a pass of that model for each token, for all rows together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from mlx_parallm.engine.cost import CostModel
from mlx_parallm.engine.sequence import Sequence

MOST_TOKENS = 32
"""Tokens of all decode rows and their drafts together. An Apple GPU multiplies 32 of them by a matrix in about the time
of one, and 33 in twice that time (ml-explore/mlx#3863)."""

LONGEST_DRAFT = 7
"""Tokens of a draft at most. With the token before them they are 8, the most that the attention of Metal takes in one
call without another kernel."""

_LEAST_GAIN = 1.2
"""Least predicted gain of a unit with drafts over the same unit without. The prediction is of tokens per second of all
rows. If only some rows guess right, they end early, and the others have waited for longer units: on texts that repeat
little, 8 and 16 rows lost 5 and 7 % with 1.05 and 4 and 3 % with 1.2 (`benchmarks/speculation.py --only new`)."""

_GAIN_WORTH_WAITING = 1.25
"""Least predicted gain for which the device idles until the tokens of the unit in flight are read."""


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The best drafts of a unit: tokens of each row that has one, and how much faster tokens come."""

    tokens: Counter[Sequence]
    gain: float


class _Guess(NamedTuple):
    """One guessed token: the probability that it and those before it are right, its row, its place in the draft, from
    1, and whether the draft model has yet to draw it."""

    probability: float
    row: Sequence
    place: int
    to_draw: bool


def choose_drafts(rows: Seq[Sequence], cost: CostModel) -> None:
    """Sets `drafted` of these decode rows. A draft begins after a token that has been read."""
    if not rows:
        return
    drafts = _best_drafts(rows, (guess for row in rows if not row.unread for guess in _known(row)), cost)
    for row in rows:
        row.drafted = drafts.tokens[row] if drafts.gain >= _LEAST_GAIN else 0


def is_worth_waiting(rows: Seq[Sequence], cost: CostModel, model: CostModel | None = None) -> bool:
    """Whether the tokens of these decode rows should be read before their next unit is chosen, so that all of them can
    have drafts. `model`: of the draft model, if there is one."""
    if not rows:
        return False
    drafts = _best_drafts(rows, (guess for row in rows for guess in _known(row)), cost)
    return max(drafts.gain, _with_model(rows, cost, model).gain) >= _GAIN_WORTH_WAITING


def tokens_to_draw(rows: Seq[Sequence], cost: CostModel, model: CostModel) -> Mapping[Sequence, int]:
    """How many tokens the draft model should draw for each of these decode rows. None where other guesses are better,
    and none at all where its passes take longer than they gain."""
    if not rows:
        return {}
    without = _best_drafts(rows, (guess for row in rows for guess in _known(row)), cost)
    drafts = _with_model(rows, cost, model)
    if drafts.gain < _LEAST_GAIN or drafts.gain <= without.gain:
        return {}
    return {row: tokens for row, tokens in drafts.tokens.items() if _prefers_model(row)}


def _with_model(rows: Seq[Sequence], cost: CostModel, model: CostModel | None) -> _Drafts:
    """The best drafts if the draft model guesses for the rows for which it is right more often than other guesses."""
    if model is None:
        return _Drafts(Counter(), 1.0)
    guesses = (guess for row in rows for guess in (_to_draw(row) if _prefers_model(row) else _known(row)))
    return _best_drafts(rows, guesses, cost, model)


def _best_drafts(
    rows: Seq[Sequence], guesses: Iterator[_Guess], cost: CostModel, model: CostModel | None = None
) -> _Drafts:
    """The most probable of these guesses for the rows of a unit, as many as let tokens come fastest."""
    most_probable = sorted(guesses, key=lambda guess: -guess.probability)[: max(MOST_TOKENS - len(rows), 0)]
    advance, drawing, best = float(len(rows)), 0.0, _Drafts(Counter(), 1.0)
    in_pass: Counter[int] = Counter()  # rows in each pass of the draft model
    for taken, guess in enumerate(most_probable, 1):
        advance += guess.probability
        if guess.to_draw and model is not None:
            before, in_pass[guess.place] = in_pass[guess.place], in_pass[guess.place] + 1
            drawing += model.step_seconds(before + 1) - model.step_seconds(before)
        length = cost.growth(len(rows), len(rows) + taken) + drawing / cost.step_seconds(len(rows))
        if advance / len(rows) / length > best.gain:
            best = _Drafts(Counter(each.row for each in most_probable[:taken]), advance / len(rows) / length)
    return best


def _known(row: Sequence) -> Iterator[_Guess]:
    """The guesses that a row has."""
    return (_Guess(row.acceptance**place, row, place, False) for place in range(1, _most(row, len(row.guess)) + 1))


def _to_draw(row: Sequence) -> Iterator[_Guess]:
    """The guesses that a row would have of the draft model."""
    most = _most(row, LONGEST_DRAFT)
    return (_Guess(row.model_acceptance**place, row, place, True) for place in range(1, most + 1))


def _prefers_model(row: Sequence) -> bool:
    return row.model_acceptance > (row.acceptance if row.guess else 0.0)


def _most(row: Sequence, tokens: int) -> int:
    """The longest draft of a row that has so many guesses: no token is drawn after `max_tokens`."""
    return max(0, min(tokens, row.max_tokens - row.drawn - 1))
