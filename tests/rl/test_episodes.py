"""Episodes of several turns: how turns become samples, and which tokens are credited with which reward."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from configs import loss_config
from rl.fakes import trajectories

from mlx_parallm.config import Algorithm
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.objectives import ScoredGroup, data_of, prepare, token_advantages
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.trajectories import FEEDBACK, DropReason, Episode
from mlx_parallm.train.data import Datum
from mlx_parallm.train.losses import LOSSES, TokenBatch, UpdateTotals, sequence_mean

ONE = trajectories("t", AdapterRef("math", 1), 1)[0]


def turn(prompt: tuple[int, ...], drawn: tuple[int, ...], **fields: object) -> Trajectory:
    logprobs = tuple(-0.1 * token for token in drawn)
    return replace(ONE, prompt_ids=prompt, completion_ids=drawn, sampling_logprobs=logprobs, **fields)


def made(*turns: Trajectory, mask_truncated: bool = False) -> list[Datum]:
    advantages = [[float(number)] * len(each.completion_ids) for number, each in enumerate(turns, 1)]
    return list(data_of(Episode(turns), advantages, 7, True, mask_truncated))


def test_a_turn_whose_prompt_continues_the_tokens_so_far_joins_their_sample() -> None:
    first, second = turn((1, 2), (3, 4)), turn((1, 2, 3, 4, 5), (6,), temperature=0.5, adapter=AdapterRef("math", 2))
    (sample,) = made(first, second)
    assert sample.token_ids == (1, 2, 3, 4, 5, 6)
    assert sample.loss_weights == (0, 0, 1, 1, 0, 1)
    assert [sample.advantages[at] for at in sample.trained()] == [1, 1, 2]
    assert [sample.sampling_logprobs[at] for at in sample.trained()] == pytest.approx([-0.3, -0.4, -0.6])
    assert [(s.start, s.stop, s.temperature, str(s.adapter)) for s in sample.sampled] == [
        (2, 4, 1.0, "math@1"),
        (5, 6, 0.5, "math@2"),
    ]


def test_a_turn_that_continues_nothing_is_a_sample_of_its_own() -> None:
    samples = made(turn((1, 2), (3, 4)), turn((1, 2, 3, 9), (6,)), turn((1, 2, 3, 4, 5), (7,)))
    assert [sample.token_ids for sample in samples] == [(1, 2, 3, 4, 5, 7), (1, 2, 3, 9, 6)]
    assert {sample.group for sample in samples} == {7}


def test_a_turn_that_was_cut_off_is_context_if_truncated_answers_are_masked() -> None:
    cut, whole = turn((1,), (2, 3), finish_reason=FinishReason.LENGTH), turn((1, 2, 3, 4), (5,))
    (sample,) = made(cut, whole, mask_truncated=True)
    assert sample.loss_weights == (0, 0, 0, 0, 1)
    assert made(cut, mask_truncated=True) == []


def test_without_rewards_of_tokens_every_token_has_the_advantage_of_its_episode() -> None:
    episodes = [Episode((turn((1,), (2, 3)), turn((9,), (4,)))), Episode((turn((1,), (5,)),))]
    assert token_advantages(episodes, [0.5, -0.5], 2.0) == [[[0.5, 0.5], [0.5]], [[-0.5]]]


def test_a_reward_counts_for_its_token_and_those_before_it() -> None:
    """By hand: rewards 1 after turn 0 of the first episode, 3 and 0 for the episodes as a whole; divisor 1."""
    first = Episode((turn((1,), (2, 3)), turn((9,), (4,))), ((0.0, 1.0), ()))
    second = Episode((turn((1,), (2, 3)), turn((9,), (4,))))
    # Whole rewards 4 and 0, mean 2. From turn 1 on: rewards 3 and 0, mean 1.5.
    assert token_advantages([first, second], [2.0, -2.0], 1.0) == [[[2.0, 2.0], [1.5]], [[-2.0, -2.0], [-1.5]]]
    early = Episode((turn((1,), (2, 3)),), ((1.0, 0.0),))
    assert token_advantages([early, Episode((turn((1,), (5,)),))], [0.5, -0.5], 1.0) == [[[0.5, -0.5]], [[-0.5]]]


BROKEN = (turn((1, 2), (3, 4, 5)), turn((9, 9), (6,)), turn((8, 8), (6, 7)))
"""Of which no turn continues another one, as after a context was shortened."""
WHOLE = (turn((1, 2), (3, 4, 5)), turn((1, 2, 3, 4, 5), (6,)), turn((1, 2, 3, 4, 5, 6), (6, 7)))
"""The same answers, of which each continues the one before it."""


@pytest.mark.parametrize("algorithm", LOSSES)
def test_an_episode_counts_once_however_it_broke_into_samples(algorithm: Algorithm) -> None:
    """The factors of all its tokens are those of the same episode in one sample, and those of another one are too. So
    where all answers weigh the same, the advantages of a balanced group add up to 0."""
    config, other = loss_config(algorithm, max_completion_tokens=16), Episode((turn((1, 2), (5, 5)),))

    def factors(turns: tuple[Trajectory, ...]) -> list[float]:
        group = ScoredGroup((Episode(turns), other), (1.0, 0.0), "s")
        samples = prepare([group], loss_config(max_completion_tokens=16), RewardHistory()).batch.samples
        assert sum(sample.share for sample in samples) == 2
        weights = pad([[sample.loss_weights[at] for at in sample.trained()] for sample in samples])
        shares = mx.array([sample.share for sample in samples])
        batch = TokenBatch(weights, weights, weights, weights, weights, shares, mx.ones_like(shares))
        _, reduction = LOSSES[algorithm]
        by_row = mx.broadcast_to(reduction(batch, UpdateTotals.of(samples), config), (len(samples),)).tolist()
        if reduction is sequence_mean:
            credits = [f * sum(s.advantages[at] for at in s.trained()) for f, s in zip(by_row, samples, strict=True)]
            assert sum(credits) == pytest.approx(0, abs=1e-6)
        return [factor for factor, sample in zip(by_row, samples, strict=True) for _ in sample.trained()]

    assert factors(BROKEN) == pytest.approx(factors(WHOLE), rel=1e-6)


def pad(rows: list[list[float]]) -> mx.array:
    width = max(map(len, rows))
    return mx.array([[*row, *[0.0] * (width - len(row))] for row in rows])


EARLY, LATE = Episode((turn((1,), (2, 3)),), ((1.0, 0.0),)), Episode((turn((1,), (4, 5)),), ((0.0, 1.0),))
"""Of equal whole rewards."""


@pytest.mark.parametrize("scorer", ["s", FEEDBACK])
def test_episodes_of_equal_rewards_are_compared_by_those_of_their_tokens(scorer: str) -> None:
    """Also if a client gave them, which is the only way to reward tokens."""
    first, last = EARLY, LATE
    group = ScoredGroup((first, last), (1.0, 1.0), scorer)
    assert group.is_compared
    assert group.no_signal is None
    (one, other) = prepare([group], loss_config(), RewardHistory()).batch.samples
    # credits: 0 and -1 for the tokens of the first, 0 and 0 for those of the last; their deviation is 1/2
    assert one.advantages == pytest.approx((0, 0, -1 / 0.5001))
    assert other.advantages == pytest.approx((0, 0, 0), abs=1e-9)
    same = replace(group, episodes=(first, Episode(LATE.turns, first.token_rewards)))
    assert same.no_signal is DropReason.ZERO_VARIANCE
    if scorer != FEEDBACK:  # equal scores from people are compared with earlier ones
        assert prepare([same], loss_config(), RewardHistory()).batch.samples == ()
