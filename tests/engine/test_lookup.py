"""What follows the last tokens of a text, as they occurred before."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mlx_parallm.engine.speculate import PromptLookup


def test_the_newest_occurrence_of_the_longest_ending_decides() -> None:
    tokens = [1, 2, 3, 10, 11, 9, 2, 3, 20, 21, 1, 2, 3]
    assert PromptLookup(tokens).propose(4) == [10, 11, 9, 2], "three tokens agree there, two where 20 follows"
    assert PromptLookup(tokens[1:]).propose(2) == [20, 21], "of two, the newest"


def test_a_text_without_repetition_gives_no_draft() -> None:
    assert PromptLookup([1, 2, 3, 4, 5]).propose(8) == ()
    assert PromptLookup([]).propose(8) == ()
    assert PromptLookup([1]).propose(8) == ()


def test_a_loop_goes_on() -> None:
    assert PromptLookup([7, 8, 7, 8, 7, 8]).propose(5) == [7, 8, 7, 8, 7]
    assert PromptLookup([4, 4, 4]).propose(3) == [4, 4, 4]


def test_a_text_that_grows_is_looked_up_as_a_new_one_would_be() -> None:
    rng = random.Random(0)
    tokens: list[int] = []
    growing = PromptLookup(tokens)
    for _ in range(400):
        tokens.append(rng.randrange(6))
        assert list(growing.propose(5)) == list(searched(tokens, 5))


def searched(tokens: Sequence[int], most: int) -> list[int]:
    """The draft, by trying every place."""
    for length in (3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[end - length : end]) == list(tokens[len(tokens) - length :]):
                found = list(tokens[end : end + most])
                while len(found) < most:
                    found += found[: most - len(found)]
                return found
    return []
