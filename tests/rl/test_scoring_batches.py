"""How many trajectories the scorers get at a time."""

from __future__ import annotations

import pytest

from mlx_parallm.rl.scoring.pool import BatchSize


def after(*batches: tuple[int, float], most: int = 32) -> int:
    size = BatchSize(most)
    for trajectories, seconds in batches:
        size.observe(trajectories, seconds)
    return size.now


def test_the_first_batch_is_as_large_as_it_may_be() -> None:
    assert after() == 32


@pytest.mark.parametrize(("each", "size"), [(0.001, 32), (0.025, 10), (0.05, 5), (2.0, 1)])
def test_a_batch_takes_about_a_quarter_of_a_second(each: float, size: int) -> None:
    assert after((32, 32 * each)) == size


def test_it_follows_scorers_that_become_slower_or_faster() -> None:
    slow, fast = [(8, 8 * 0.1)] * 20, [(8, 8 * 0.01)] * 20
    assert after(*fast, *slow) == 2
    assert 20 <= after(*slow, *fast) <= 25


def test_scorers_that_take_no_time_get_all() -> None:
    assert after((5, 0.0)) == 32
