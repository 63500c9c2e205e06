"""How many draft tokens a unit checks, by what they cost and how often they are right."""

from __future__ import annotations

import pytest
from driver import new_sequence

from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.sequence import Sequence
from mlx_parallm.engine.speculate import choose_drafts, tokens_to_draft

CHEAP = CostModel(fixed=0.05, per_token=0.001, per_pair=0.0, per_sample=0.001)
DEAR = CostModel(fixed=0.001, per_token=0.05, per_pair=0.0, per_sample=0.01)


def row(acceptance: float, proposed: int = 7, max_tokens: int = 100, sampled: int = 1) -> Sequence:
    sequence = new_sequence([0] * (20 + sampled), max_tokens)
    sequence.prompt_length, sequence.sampled, sequence.computed = 20, sampled, 20 + sampled - 1
    sequence.proposed, sequence.acceptance = [1] * proposed, acceptance
    return sequence


def drafted(cost: CostModel, *rows: Sequence) -> list[int]:
    choose_drafts(rows, cost)
    return [each.drafted for each in rows]


def test_the_better_the_tokens_the_longer_the_drafts() -> None:
    lengths = [drafted(CHEAP, row(acceptance))[0] for acceptance in (0.02, 0.3, 0.6, 0.9, 1.0)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (0, 7)
    assert 0 < lengths[2] < 7


def test_nothing_is_drafted_where_each_token_costs_a_pass() -> None:
    assert drafted(DEAR, row(0.9), row(0.9)) == [0, 0]


@pytest.mark.parametrize(("max_tokens", "sampled", "most"), [(10, 9, 0), (10, 8, 1), (10, 1, 7), (3, 1, 1)])
def test_no_token_is_drafted_beyond_the_last_one(max_tokens: int, sampled: int, most: int) -> None:
    assert drafted(CHEAP, row(1.0, max_tokens=max_tokens, sampled=sampled)) == [most]


def test_the_measured_times_of_a_few_rows_decide() -> None:
    """On this device two rows take as long as one, and four three times as long."""
    measured = CostModel(steps=((1, 0.01), (2, 0.01), (4, 0.03), (32, 0.04)))
    assert drafted(measured, row(0.7)) == [1]
    assert drafted(measured, row(0.7), row(0.7)) == [0, 0]
    assert measured.growth(2, 3) == pytest.approx(2.0)


THIRD = CostModel(fixed=0.02, per_token=0.005, per_pair=0.0, per_sample=0.005)
"""A unit of 4 rows takes a third longer with two tokens of drafts."""


def test_no_sequence_is_left_behind_for_a_small_gain() -> None:
    fast, slow = [row(0.95, proposed=1) for _ in range(2)], [row(0.0, proposed=0) for _ in range(2)]
    assert drafted(THIRD, *fast, *slow) == [0, 0, 0, 0]
    assert drafted(THIRD, *fast) == [1, 1], "none waits for another one"
    for each in slow:
        each.ahead = 0.5  # tokens that its own drafts gave it before
    assert drafted(THIRD, *fast, *slow) == [1, 1, 0, 0]


def test_the_more_all_gain_the_further_one_may_be_left_behind() -> None:
    fast, slow = [row(0.95) for _ in range(3)], row(0.0, proposed=0)
    assert sum(drafted(CHEAP, *fast, slow)) > 9
    slow.ahead = -20.0
    assert drafted(CHEAP, *fast, slow) == [0, 0, 0, 0]


def test_drafts_and_rows_stay_within_what_a_device_computes_at_once() -> None:
    twenty = [row(0.9) for _ in range(20)]
    for each in twenty:
        each.ahead = 1.0
    assert sum(drafted(CHEAP, *twenty)) == 12
    for each in twenty[10:]:
        each.ahead = 0.5
    assert drafted(CHEAP, *twenty)[10:] == [1] * 10, "those that got fewer go first"
    assert sum(drafted(CHEAP, *[row(1.0) for _ in range(40)])) == 0


# -- a draft model -------------------------------------------------------------------------------

QUICK = CostModel(fixed=0.002, per_token=0.0001, per_pair=0.0)


def to_draft(model: CostModel, *rows: Sequence, cost: CostModel = CHEAP) -> list[int]:
    tokens = tokens_to_draft(rows, cost, model)
    return [tokens.get(each, 0) for each in rows]


def modelled(acceptance: float, proposed: int = 0, of_draft: float = 0.0, **counts: int) -> Sequence:
    sequence = row(of_draft, proposed, **counts)
    sequence.model_acceptance = acceptance
    return sequence


def test_the_better_a_draft_model_is_the_more_it_drafts() -> None:
    lengths = [to_draft(QUICK, modelled(acceptance))[0] for acceptance in (0.0, 0.05, 0.5, 0.7, 1.0)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (0, 7)


def test_a_draft_model_drafts_nothing_where_its_passes_take_longer_than_they_gain() -> None:
    assert to_draft(CHEAP, modelled(0.9)) == [0], "it is as slow as the model itself"
    assert to_draft(QUICK, modelled(0.9), cost=DEAR) == [0]


def test_a_draft_model_drafts_no_token_beyond_the_last_one() -> None:
    assert to_draft(QUICK, modelled(1.0, max_tokens=4, sampled=1)) == [2]
    assert to_draft(QUICK, modelled(1.0, max_tokens=2, sampled=1)) == [0]
