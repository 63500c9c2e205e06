"""The section `rl_training.curriculum`."""

import pytest

from mlx_parallm.config import RLTrainingConfig


def test_a_curriculum_needs_tasks_of_its_own():
    on = {"curriculum": {"enabled": True}}
    assert RLTrainingConfig(environment="tasks.jsonl", **on).curriculum.floor == 0.2
    for keys in ({}, {"environment": "gsm8k", "atropos_url": "http://127.0.0.1:9"}):
        with pytest.raises(ValueError, match="there are no tasks to draw"):
            RLTrainingConfig(**keys, **on)


@pytest.mark.parametrize("values", [{"floor": 1.1}, {"floor": -0.1}, {"memory": 0}, {"levels": 3}])
def test_values_that_mean_nothing_are_refused(values):
    with pytest.raises(ValueError, match=rf"curriculum.{next(iter(values))}"):
        RLTrainingConfig(environment="tasks.jsonl", curriculum={"enabled": True, **values})
