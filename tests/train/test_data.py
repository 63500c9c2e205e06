"""What a sample may be, and what an update makes of trajectories."""

from __future__ import annotations

from dataclasses import replace

import pytest
from configs import loss_config
from rl.fakes import answers, trajectories
from sample_parts import advantage, answer, drawn_logprobs

from mlx_parallm.config import Algorithm
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import FinishReason
from mlx_parallm.rl.objectives import ScoredGroup, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.train.data import Datum, SampledSpan, answered


def test_an_answer_is_trained_and_its_prompt_is_not() -> None:
    sample = answered((1, 2), (3, 4), (-0.5, -1.0), 0.7, 2.0, group=5)
    assert sample.trained() == [2, 3]
    assert (answer(sample), advantage(sample), drawn_logprobs(sample)) == ((3, 4), 2.0, [-0.5, -1.0])
    assert sample.temperatures() == [1.0, 1.0, 0.7, 0.7]
    assert (sample.weight, sample.group) == (2.0, 5)


def test_tokens_between_sampled_spans_are_at_temperature_one() -> None:
    sampled = (SampledSpan(1, 2, 0.5), SampledSpan(3, 5, 2.0))
    sample = Datum((1, 2, 3, 4, 5), (0, 1, 0, 1, 1), (0.0,) * 5, sampled=sampled)
    assert sample.temperatures() == [1.0, 0.5, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("weights", "advantages", "logprobs", "message"),
    [
        ((0.0, 1.0), (0.0,) * 3, (), "loss_weights has 2 values for 3 tokens"),
        ((0.0, 1.0, 1.0), (0.0,) * 4, (), "advantages has 4 values for 3 tokens"),
        ((0.0, 1.0, 1.0), (0.0,) * 3, (-1.0,), "sampling_logprobs has 1 values for 3 tokens"),
        ((0.0, 0.0, 0.0), (0.0,) * 3, (), "needs a token whose weight is above 0"),
        ((0.0, -1.0, 1.0), (0.0,) * 3, (), "and none below it"),
        ((1.0, 1.0, 1.0), (0.0,) * 3, (), "the first token"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_refused(weights, advantages, logprobs, message) -> None:
    with pytest.raises(ValueError, match=message):
        Datum((1, 2, 3), weights, advantages, logprobs)


@pytest.mark.parametrize("name", ["teacher_logprobs", "reference_logprobs"])
def test_logprobs_of_another_policy_are_as_many_as_the_tokens(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 1 values for 3 tokens"):
        Datum((1, 2, 3), (0.0, 1.0, 1.0), (0.0,) * 3, **{name: (-1.0,)})


@pytest.mark.parametrize("share", [-0.5, 0.0, 1.5])
def test_a_share_is_a_part_of_an_episode_or_all_of_it(share: float) -> None:
    assert replace(answered((1,), (2,)), share=1.0).share == 1.0
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        replace(answered((1,), (2,)), share=share)


@pytest.mark.parametrize(
    ("logprobs", "is_placeholder"),
    [((0.0,) * 4, True), ((0.0,) * 3, False), ((0.0, 0.0, -0.1, 0.0), False), ((), False)],
)
def test_zeros_at_four_trained_tokens_or_more_are_placeholders(logprobs: tuple[float, ...], is_placeholder) -> None:
    sample = answered((1, 2, 3, 4), range(len(logprobs) or 4), logprobs)
    assert sample.has_placeholder_logprobs == is_placeholder


@pytest.mark.parametrize("algorithm", [Algorithm.GRPO, Algorithm.CROSS_ENTROPY])
def test_truncated_answers_can_be_left_out_of_training_and_still_count_in_their_group(algorithm) -> None:
    one, two, three = trajectories("g", BASE_ADAPTER, 3)
    cut = replace(one, finish_reason=FinishReason.LENGTH)
    group = ScoredGroup(answers(cut, two, three), (1.0, 0.5, 3.0), "a", 0, True)
    for masked in (False, True):
        settings = loss_config(algorithm, mask_truncated=masked)
        samples = prepare([group], settings, RewardHistory()).batch.samples
        whole = prepare([group], loss_config(algorithm), RewardHistory()).batch.samples
        assert samples == whole[1 if masked else 0 :]
    assert [sample.sampled[0].ended for sample in whole] == [FinishReason.LENGTH, *[FinishReason.STOP] * 2]
