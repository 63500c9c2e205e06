"""What an update writes takes the place of what it needs no more."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from configs import changed
from few_operations import growth
from mlx.utils import tree_map
from trainers import LORA, make_policy, make_trainer, samples

from mlx_parallm.train.accumulation import Accumulated, Accumulation
from mlx_parallm.train.policy import Policy
from mlx_parallm.train.step import Step
from mlx_parallm.train.trainer import GRPOTrainer


def learning_with(layers: int) -> tuple[GRPOTrainer, Policy]:
    """Large factors of a tiny model, so that little else takes memory."""
    trainer, _ = make_trainer(lora=changed(LORA, lora_rank=256), measure_kl=False, num_hidden_layers=layers)
    return trainer, make_policy(trainer, moved=0.1)


@pytest.fixture
def learning() -> tuple[GRPOTrainer, Policy]:
    return learning_with(layers=2)


def gradients_of(policy: Policy) -> Any:
    found = tree_map(lambda leaf: mx.ones(leaf.shape) / 8, policy.params)
    mx.eval(found)
    return found


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
def test_a_step_takes_no_memory_besides_the_new_state(
    learning: tuple[GRPOTrainer, Policy], max_grad_norm: float
) -> None:
    """Gradients, clipped or not, and intermediate arrays are no more than the gradients were."""
    trainer, policy = learning
    accumulated = Accumulated(gradients_of(policy))
    step = Step(policy, changed(trainer.config.optimizer, max_grad_norm=max_grad_norm))
    with growth() as grown:
        step.run(accumulated)
    assert step.after is not None
    assert grown.nbytes < policy.nbytes


def test_gradients_of_several_calls_are_added_in_place(learning: tuple[GRPOTrainer, Policy]) -> None:
    trainer, policy = learning
    work = Accumulation(policy, samples(4), trainer.config.loss, 64)
    work.gradients = gradients_of(policy)
    before = Accumulated(gradients_of(policy))
    with growth() as grown:
        Accumulated.of(work, before)
    assert grown.nbytes < 4 * policy.parameters / 8


def test_gradients_of_micro_steps_are_added_in_place_layer_by_layer() -> None:
    trainer, policy = learning_with(layers=6)
    work = Accumulation(policy, samples(12), trainer.config.loss, 32)
    held = []
    for batch in work.batches:
        for stage in trainer._jobs._micro_step({work: batch}):
            with growth() as grown:
                stage.evaluate()
            assert grown.nbytes < 2 / 6 * 4 * policy.parameters
        del stage
        held.append(mx.get_active_memory())
    assert len(held) > 1
    assert max(held) - held[0] < 4 * policy.parameters / 2
