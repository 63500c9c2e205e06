"""What is trained of a group that an Atropos environment sends, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from configs import TRAINING

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.extras.atropos.scored_data import ScoredData, TokenLimits, trajectories_of
from mlx_parallm.rl.objectives import ScoredGroup, prepare
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.trajectories import Episode

LIMITS = TokenLimits(context=8, vocabulary=100)


def group(**fields: Any) -> ScoredData:
    """Two sequences; the first has a tool result, 7, between two tokens that were drawn."""
    sent = {
        "tokens": [[1, 2, 3, 7, 4, 9], [1, 2, 5]],
        "masks": [[-100, -100, 3, -100, 4, -100], [-100, -100, 5]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, -0.5, 1.0, -0.25, 1.0], [1.0, 1.0, -2.0]],
    }
    return ScoredData.model_validate({**sent, **fields})


def test_the_samples_have_the_masks_logprobs_and_temperatures() -> None:
    data = group(overrides=[{"temperature": 0.5}, {}], generation_params={"temperature": 0.8})
    made = trajectories_of(data, LIMITS)
    scored = ScoredGroup(tuple(Episode((each,)) for each in made), (1.0, 0.0), "atropos")
    first, second = prepare([scored], TRAINING.loss, RewardHistory()).batch.samples
    assert first.token_ids == (1, 2, 3, 7, 4)
    assert first.loss_weights == (0, 0, 1, 0, 1)
    assert first.sampling_logprobs == (0.0, 0.0, -0.5, 0.0, -0.25)
    assert first.temperatures() == [1.0, 1.0, 0.5, 1.0, 0.5]
    assert second.temperatures() == [1.0, 1.0, 0.8]
    assert not first.on_policy
    assert first.advantages[2] > 0 > second.advantages[2]


@pytest.mark.parametrize(
    ("fields", "temperatures"),
    [
        ({}, (1.0, 1.0)),
        ({"group_overrides": {"temperature": 0.2}}, (0.2, 0.2)),
        ({"group_overrides": {"temperature": 0.2}, "generation_params": {"temperature": 0.3}}, (0.3, 0.3)),
        ({"generation_params": {"temperature": 0.3}, "overrides": [{}, {"temperature": 0.4}]}, (0.3, 0.4)),
    ],
)
def test_the_nearest_temperature_counts(fields: dict[str, Any], temperatures: tuple[float, float]) -> None:
    assert tuple(each.temperature for each in trajectories_of(group(**fields), LIMITS)) == temperatures


def test_a_sequence_whose_advantage_is_overridden_counts_in_the_mean_but_pushes_nothing() -> None:
    data = group(overrides=[{}, {"set_advantage_to_zero": True}])
    made = trajectories_of(data, LIMITS)
    scored = ScoredGroup(tuple(Episode((each,)) for each in made), (1.0, 0.0), "atropos")
    first, second = prepare([scored], TRAINING.loss, RewardHistory()).batch.samples
    assert first.advantages[2] == pytest.approx(1.0, abs=1e-3)
    assert set(second.advantages) == {0.0}


def test_given_advantages_of_tokens_replace_those_of_scores() -> None:
    advantages = [[9.0, 9.0, 0.5, 9.0, -0.5, 9.0], [9.0, 9.0, 2.0]]
    made = trajectories_of(group(advantages=advantages, scores=[0.0, 0.0]), LIMITS)
    scored = ScoredGroup(tuple(Episode((each,)) for each in made), (0.0, 0.0), "atropos")
    prepared = prepare([scored], TRAINING.loss, RewardHistory())
    first, second = prepared.batch.samples
    assert [first.advantages[at] for at in first.trained()] == [0.5, -0.5]
    assert [second.advantages[at] for at in second.trained()] == [2.0]
    assert prepared.drop_reasons == (None,), "equal scores do not matter then"


def test_reference_logprobs_take_the_place_of_the_base_models() -> None:
    made = trajectories_of(group(ref_logprobs=[[1.0, 1.0, -0.1, 1.0, -0.2, 1.0], [1.0, 1.0, -0.3]]), LIMITS)
    scored = ScoredGroup(tuple(Episode((each,)) for each in made), (1.0, 0.0), "atropos")
    first, second = prepare([scored], TRAINING.loss, RewardHistory()).batch.samples
    assert [first.reference_logprobs[at] for at in first.trained()] == [-0.1, -0.2]
    assert [second.reference_logprobs[at] for at in second.trained()] == [-0.3]


def test_what_the_default_collector_leaves_empty_counts_as_not_sent() -> None:
    empty = {"advantages": [], "ref_logprobs": [], "messages": [], "overrides": [], "images": [], "group_overrides": {}}
    assert trajectories_of(group(**empty, inference_logprobs=None), LIMITS)[0].sampling_logprobs == ()


def test_the_first_token_is_never_trained() -> None:
    (one,) = trajectories_of(group(tokens=[[1, 2]], masks=[[1, 2]], scores=[1], inference_logprobs=None), LIMITS)
    assert (one.prompt_ids, one.completion_ids) == ((1,), (2,))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scores": [1.0]}, "scores: there are 1 for 2 sequences"),
        ({"masks": [[-100, -100, 3]]}, "masks: there are 1 for 2 sequences"),
        ({"masks": [[-100, 3], [-100, -100, 5]]}, r"masks\[0\]: there are 2 values for 6 tokens"),
        ({"masks": [[-100, -100, 4, -100, 4, -100], [-100, -100, 5]]}, r"masks\[0\]: position 2 is 4"),
        ({"tokens": [[1, 2, 3, 7, 4, 100], [1, 2, 5]]}, "from 0 to 99"),
        ({"tokens": [[1] * 9, [1, 2, 5]], "masks": [[1] * 9, [1, 2, 5]]}, "9 tokens do not fit the context of 8"),
        ({"tokens": [], "masks": [], "scores": []}, "a group has 1 to 4096 sequences"),
        ({"scores": [1.0, float("inf")]}, "must be finite"),
        ({"inference_logprobs": [[1.0, 1.0, 1.0, 1.0, -1.0, 1.0], [1.0, 1.0, -1.0]]}, "position 2 is trained"),
        ({"generation_params": {"temperature": 0}}, "above 0"),
        ({"generation_params": {"temperature": "hot"}}, "above 0"),
        ({"images": ["a cat"]}, "text alone"),
        ({"distill_token_ids": [[[1]]], "distill_logprobs": [[[-0.1]]]}, "does not distil"),
        ({"overrides": [{}]}, "overrides: there are 1 for 2 sequences"),
        ({"advantages": [[1.0], [1.0]]}, r"advantages\[0\]: there are 1 values for 6 tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        trajectories_of(group(**fields), LIMITS)
