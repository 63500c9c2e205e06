"""Where the tokens of rows lie, and what of them is shared."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from trainers import all_buckets

from mlx_parallm.train.branches import Branch, Bucket
from mlx_parallm.train.packing import Row, laid_out


def rows(*tokens: Sequence[int]) -> list[Row]:
    return [Row.of(row) for row in tokens]


PROMPT, TURN = list(range(10, 15)), list(range(20, 26))


def test_a_group_is_its_prompt_and_buckets() -> None:
    branch, order = laid_out(rows([*PROMPT, 1, 2, 3], [*PROMPT, 4], [*PROMPT, 5, 6]))
    assert branch == Branch(0, 5, (Bucket(3, 3, 3),))
    assert order == [1, 2, 0]
    assert branch.tokens == 5 + 9


def test_a_turn_that_two_rows_share_is_a_branch_in_the_branch_of_the_prompt() -> None:
    branch, _ = laid_out(rows([*PROMPT, *TURN, 1], [*PROMPT, 7, 7], [*PROMPT, *TURN, 2, 3], [*PROMPT, 8]))
    assert branch == Branch(0, 5, (Bucket(2, 2, 1),), (Branch(5, 6, (Bucket(2, 2, 1),)),))
    assert branch.tokens == 5 + 4 + 6 + 4


def test_what_would_save_next_to_nothing_is_not_shared() -> None:
    """A branch costs an attention call: two rows that go on with the same two tokens keep them."""
    branch, _ = laid_out(rows([*PROMPT, 1, 2, 3], [*PROMPT, 1, 2, 4], [*PROMPT, 5]))
    assert branch.branches == ()


def test_a_longer_shared_part_is_found_behind_a_short_one() -> None:
    """Four rows share one token, which is not worth a branch, and two of them ten more."""
    long = list(range(30, 40))
    branch, _ = laid_out(rows([*PROMPT, 1, *long, 2], [*PROMPT, 1, *long, 3], [*PROMPT, 1, 4], [*PROMPT, 9]))
    assert [(branch.start, branch.length) for branch in branch.branches] == [(5, 11)]


def test_one_row_and_rows_with_nothing_in_common() -> None:
    assert laid_out(rows([1, 2, 3]))[0] == Branch(0, 3, (Bucket(1, 0, 0),))
    assert laid_out(rows([1, 2, 3], [4, 5, 6]))[0] == Branch(0, 0, (Bucket(2, 3, 0),))


@pytest.mark.parametrize("seed", range(30))
def test_every_token_of_every_row_has_its_place(seed: int) -> None:
    """Over random rows that share much: no two rows disagree about a place, and nothing takes more room than apart."""
    rng = random.Random(seed)
    drawn = rows(
        *([rng.randint(0, 1 + seed % 3) for _ in range(rng.randint(1, 25))] for _ in range(rng.randint(1, 12)))
    )
    branch, order = laid_out(drawn)
    assert sorted(order) == list(range(len(drawn)))
    positions = list(branch.positions())
    assert len(positions) == branch.tokens
    content: dict[int, int] = {}
    for row, pieces in zip(order, branch.rows(), strict=True):
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop >= len(drawn[row].ids)
        for piece in pieces:
            for position in range(piece.start, min(piece.stop, len(drawn[row].ids))):
                place = piece.at + position - piece.start
                assert positions[place] == position
                assert content.setdefault(place, drawn[row].ids[position]) == drawn[row].ids[position]
    padding = sum(bucket.padding for bucket in all_buckets(branch))
    assert len(content) == branch.tokens - padding <= sum(len(row.ids) for row in drawn)
    rng.shuffle(drawn)
    assert laid_out(drawn)[0] == branch
